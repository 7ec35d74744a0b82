"""The ladder of captured decode steps and the choice among them."""

from __future__ import annotations

import pytest

from shard_server.config import ShardConfig, load_config
from shard_server.errors import StartError
from shard_server.graph_sizes import GraphShape, ShapeIndex, context_bounds, ladder, shapes


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 512, 4000])
def test_the_ladder_rises_from_1_to_the_most_rows_and_wastes_at_most_half_of_a_step(max_num_seqs: int) -> None:
    sizes = ladder(max_num_seqs)
    largest = min(max_num_seqs, 512)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    for rows in range(1, largest + 1):
        size = min(size for size in sizes if size >= rows)
        assert size < 2 * rows and size - rows < 64


def test_bounds_end_with_the_longest_context() -> None:
    assert context_bounds(8192) == [256, 512, 1024, 4096, 8192]
    assert context_bounds(1024) == [256, 512, 1024]
    assert context_bounds(300) == [256, 300]


def test_batches_that_fill_the_device_have_one_bound_unless_a_layer_has_a_window() -> None:
    found = shapes([1, 64], 8192, num_kv_heads=8, has_window=False)
    assert found == [GraphShape(64, 8192), *(GraphShape(1, bound) for bound in (8192, 4096, 1024, 512, 256))]
    assert len(shapes([1, 64], 8192, num_kv_heads=8, has_window=True)) == 10
    assert len(shapes([1, 64], 8192, num_kv_heads=1, has_window=False)) == 10


def test_a_step_gets_the_smallest_shape_that_holds_it() -> None:
    index = ShapeIndex(shapes([1, 2, 64], 8192, num_kv_heads=8, has_window=False))
    assert index.choose(1, 600) == GraphShape(1, 1024)
    assert index.choose(2, 1025) == GraphShape(2, 4096)
    assert index.choose(3, 5) == GraphShape(64, 8192)
    assert index.choose(65, 5) is None
    assert ShapeIndex([]).choose(1, 1) is None


def test_with_adapters_each_shape_is_there_with_and_without() -> None:
    plain = shapes([1, 64], 8192, num_kv_heads=8, has_window=False)
    both = shapes([1, 64], 8192, num_kv_heads=8, has_window=False, has_adapters=True)
    assert [shape for shape in both if not shape.has_adapters] == plain
    assert {(s.num_rows, s.max_context_len) for s in both if s.has_adapters} == {
        (s.num_rows, s.max_context_len) for s in plain
    }
    assert both == sorted(both, reverse=True) and len(both) == 2 * len(plain)
    index = ShapeIndex(both)
    assert index.choose(1, 600) == GraphShape(1, 1024)
    assert index.choose(1, 600, has_adapters=True) == GraphShape(1, 1024, True)
    assert index.choose(2, 5, has_adapters=True) == GraphShape(64, 8192, True)


def test_sizes_come_from_the_flag_else_the_ladder_and_only_on_a_gpu() -> None:
    required = ["--model", "m", "--listen", "unix:s", "--max-num-seqs", "9"]
    assert load_config([*required, "--device", "cuda"]).graph_sizes == [1, 2, 4, 8, 9]
    assert load_config([*required, "--device", "cuda", "--cuda-graph-sizes", "8,2,8"]).graph_sizes == [2, 8]
    assert load_config([*required, "--device", "cuda", "--enforce-eager"]).graph_sizes == []
    assert ShardConfig(device="cpu").graph_sizes == []
    for bad in ("0", "10", "2,x", ","):
        with pytest.raises(StartError, match="--cuda-graph-sizes must be numbers from 1 to --max-num-seqs 9"):
            load_config([*required, "--cuda-graph-sizes", bad])
    with pytest.raises(StartError, match=r"--gpu-memory-utilization must be at most 1, not 1\.5"):
        load_config([*required, "--gpu-memory-utilization", "1.5"])
