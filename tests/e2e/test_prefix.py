"""A prompt that comes again is answered from the cache, with the same answer."""

from __future__ import annotations

import urllib.request

import pytest
from cohort.v1 import generation_pb2 as pb

from demo.facts import load_facts, raw_prompt
from tests.e2e.serving import ROOT, Server, Servers

BLOCK = 16
FACT = max(load_facts(), key=lambda fact: len(fact.question))
TIMEOUT_S = 60


def ask(server: Server, salt: str) -> pb.GenerateResponse:
    request = pb.GenerateRequest(
        text=raw_prompt(FACT.question) * 4,
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=32),
        output=pb.OutputOptions(logprobs=1, return_token_ids=True),
        cache_salt=salt,
    )
    return server.generation.Generate(request, timeout=TIMEOUT_S)


def hits(server: Server) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("cohort_prefix_cache_hits_total"))


@pytest.mark.parametrize(("folder", "num_shards"), [("cohere", 2), ("cohere2", 1)])
def test_the_second_of_two_equal_prompts_is_cached_and_answered_alike(
    servers: Servers, folder: str, num_shards: int
) -> None:
    flags = ("--tensor-parallel-size", str(num_shards), "--run-ahead", "1")
    server = servers.get("--model", str(ROOT / "demo" / folder), *flags)
    before = hits(server)
    first, second, apart = ask(server, folder), ask(server, folder), ask(server, f"another {folder}")
    reusable = (first.usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert reusable >= 2 * BLOCK
    assert [answer.usage.cached_tokens for answer in (first, second, apart)] == [0, reusable, 0]
    for answer in (second, apart):
        assert answer.sequences[0].token_ids == first.sequences[0].token_ids
        assert answer.sequences[0].text == first.sequences[0].text
        for one, another in zip(answer.sequences[0].logprobs, first.sequences[0].logprobs, strict=True):
            assert one.logprob == pytest.approx(another.logprob, abs=1e-4)
    assert hits(server) == before + reusable
    server.assert_idle()
