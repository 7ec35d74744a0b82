"""The workloads against their definition, spelled out here a second time, number by number."""

import random

import pytest

from bench.peers import CPU_AIMS, CPU_PEERS, CPU_WORKLOADS, GPU_AIMS, GPU_PEERS, MIXED512_OUTPUT_TOKENS
from bench.workloads import cpu_workloads, gpu_workloads

VOCAB = 256000


def test_equal_gpu_workloads_draw_their_ids_from_a_generator_seeded_with_the_long_name() -> None:
    workloads = {workload.name: workload for workload in gpu_workloads(VOCAB, 8192)}
    shapes = {
        "b1": ("b1_in128_out256", 1, 128, 256),
        "b64": ("b64_in128_out256", 64, 128, 256),
        "b256": ("b256_in128_out256", 256, 128, 256),
        "prefill": ("prefill_64x2048", 64, 2048, 1),
        "ctx": ("ctx_16x6000_out128", 16, 6000, 128),
    }
    assert list(workloads) == [*shapes, "mixed512"]
    for name, (seed, count, input_len, output_len) in shapes.items():
        requests = workloads[name].requests
        generator = random.Random(seed)
        flat = [generator.randrange(16, VOCAB - 16) for _ in range(count * input_len)]
        assert [token_id for request in requests for token_id in request.prompt] == flat
        assert {len(request.prompt) for request in requests} == {input_len} and len(requests) == count
        assert {request.num_output_tokens for request in requests} == {output_len}


def test_mixed512_draws_length_then_prompt_then_output_length_for_each_request() -> None:
    mixed = gpu_workloads(VOCAB, 8192)[-1]
    generator = random.Random("mixed")
    for request in mixed.requests:
        length = generator.randint(64, 1024)
        assert request.prompt == [generator.randrange(16, VOCAB - 16) for _ in range(length)]
        assert request.num_output_tokens == generator.randint(16, 256)
    assert len(mixed.requests) == 512
    assert mixed.num_counted_tokens == MIXED512_OUTPUT_TOKENS


def test_ids_keep_sixteen_places_from_both_ends_of_the_vocabulary() -> None:
    ids = {token_id for workload in gpu_workloads(40, 8192) for r in workload.requests for token_id in r.prompt}
    assert ids == set(range(16, 24))


def test_workloads_that_do_not_fit_are_left_out() -> None:
    names = [workload.name for workload in gpu_workloads(1024, 2048)]
    assert names == ["b1", "b64", "b256", "mixed512"]
    assert "prefill" in [workload.name for workload in gpu_workloads(1024, 2049)]


def test_cpu_workloads_have_the_asked_shapes_and_are_the_same_each_time() -> None:
    b1, b16, mixed, prefill = cpu_workloads(32000)
    for workload, shape in ((b1, (1, 64, 64)), (b16, (16, 64, 64)), (prefill, (8, 512, 1))):
        count, input_len, output_len = shape
        assert [(len(r.prompt), r.num_output_tokens) for r in workload.requests] == [(input_len, output_len)] * count
    assert len(mixed.requests) == 32
    assert all(16 <= len(r.prompt) <= 256 and 8 <= r.num_output_tokens <= 64 for r in mixed.requests)
    assert prefill.num_counted_tokens == 8 * 512 and b16.num_counted_tokens == 16 * 64
    assert cpu_workloads(32000) == [b1, b16, mixed, prefill]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_workload_has_an_aim_and_a_figure_of_every_peer(dtype: str) -> None:
    names = [workload.name for workload in cpu_workloads(32000)]
    assert list(CPU_WORKLOADS) == names == list(CPU_AIMS[dtype])
    assert all(len(figures) == len(names) for figures in CPU_PEERS[dtype].values())
    gpu_names = [workload.name for workload in gpu_workloads(VOCAB, 8192)]
    assert all(list(table) == gpu_names for table in (*GPU_PEERS.values(), *GPU_AIMS.values()))
