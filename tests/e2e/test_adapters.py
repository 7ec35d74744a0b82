"""Adapters from a folder to an answer: a router and two shards as a user starts them, against dense merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cohort.v1 import adapter_pb2, adapter_pb2_grpc
from cohort.v1 import generation_pb2 as pb
from transformers import AutoModelForCausalLM

from tests.adapter_folders import write_adapter
from tests.e2e.serving import ROOT, Server

MODEL = ROOT / "demo/cohere"
NUM_TOKENS = 8
PROMPT = [5, 40, 41, 42, 60, 61, 9]


class Served:
    """A server with three adapters, and what transformers answers with each one's weights merged in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        elsewhere = folder.parent / "elsewhere"
        self.deltas = {
            name: write_adapter(path, MODEL, seed, rank, strength=0.2)
            for name, path, seed, rank in (
                ("first", elsewhere, 1, 3),
                ("second", folder / "second", 2, 8),
                ("third", folder / "third", 3, 1),
            )
        }
        flags = ("--enable-lora", "--lora-modules", f"first={elsewhere}", "--adapter-dirs", str(folder))
        sizes = ("--max-loras", "2", "--max-lora-rank", "8", "--num-blocks-override", "64")
        self.server = Server("--model", str(MODEL), "--tensor-parallel-size", "2", *flags, *sizes)
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.server.wait_ready()
        self.adapters: Any = adapter_pb2_grpc.AdapterServiceStub(self.server.channel)

    @torch.inference_mode()
    def expected(self, deltas: dict[str, torch.Tensor] | None) -> list[int]:
        """Greedy tokens of the dense model."""
        weights = dict(self.model.named_parameters())
        for name, delta in (deltas or {}).items():
            weights[name] += delta
        ids = list(PROMPT)
        for _ in range(NUM_TOKENS):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        for name, delta in (deltas or {}).items():
            weights[name] -= delta
        return ids[len(PROMPT) :]

    def answer(self, adapter: str) -> list[int]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT),
            adapter=adapter,
            sampling=pb.SamplingParams(temperature=0),
            stopping=pb.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            output=pb.OutputOptions(return_token_ids=True),
        )
        return list(self.server.generation.Generate(request, timeout=60).sequences[0].token_ids)

    def load(self, name: str, path: str = "") -> adapter_pb2.Adapter:
        return self.adapters.LoadAdapter(adapter_pb2.LoadAdapterRequest(name=name, path=path), timeout=60).adapter


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters") / "adapters"
    served = Served(folder)
    yield served
    assert served.server.stop() == 0


def test_base_and_adapters_of_three_ranks_answer_as_dense_weights_do_all_at_once(served: Served) -> None:
    names = ["", "first", "second", "third"] * 4
    expected = {name: served.expected(served.deltas.get(name)) for name in names[:4]}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(served.answer, names)) == [expected[name] for name in names]
    served.server.assert_idle()


def test_a_name_loaded_again_with_other_content_is_another_version(served: Served) -> None:
    old = write_adapter(served.folder / "changing", MODEL, seed=10, strength=0.2)
    before = served.load("changing")
    assert served.answer("changing") == served.expected(old)
    new = write_adapter(served.folder / "changing", MODEL, seed=11, strength=0.2)
    assert served.answer("changing") == served.expected(old)
    after = served.load("changing")
    assert before.version != after.version and after.rank == 4
    assert served.answer("changing") == served.expected(new) != served.expected(old)
    served.adapters.UnloadAdapter(adapter_pb2.UnloadAdapterRequest(name="changing"), timeout=60)
    served.load("changing")
    assert served.answer("changing") == served.expected(new)


def test_what_cannot_be_applied_is_refused_with_the_shards_reason(served: Served) -> None:
    folder = served.folder / "dora"
    write_adapter(folder, MODEL, seed=12)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    for call in (lambda: served.load("dora"), lambda: served.answer("dora")):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION and "use_dora" in refused.value.details()
    assert served.answer("") == served.expected(None)
