"""How much sooner the first token comes when most of a prompt is cached, through gRPC on this CPU.

Every round has a prompt that nobody sent before and then one of the same length that begins like it, so that whatever
else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from cohort.v1 import generation_pb2_grpc

from bench import results
from bench.checkpoint import write_checkpoint
from bench.cohort_engine import CHANNEL_OPTIONS, stream_request
from bench.cpu import GEOMETRY, NUM_THREADS, VOCAB_SIZE, say
from bench.machine import cpu_facts
from bench.server_process import ServerProcess
from bench.workloads import FIRST_ID, Request

SHARED = 0.9
LENGTHS = (320, 640, 1280)
QUERIES, HITS = "cohort_prefix_cache_queries_total", "cohort_prefix_cache_hits_total"
TIMEOUT_S = 300.0


@dataclasses.dataclass(slots=True)
class PrefixResult:
    """Seconds to the first token of prompts of one length, by round; `hit_rate` is that of the cached prompts."""

    length: int
    cold_s: list[float] = dataclasses.field(default_factory=list)
    cached_s: list[float] = dataclasses.field(default_factory=list)
    num_queries: float = 0.0
    num_hits: float = 0.0

    @property
    def cold_median_s(self) -> float:
        """Of prompts that nobody sent before."""
        return statistics.median(self.cold_s)

    @property
    def cached_median_s(self) -> float:
        """Of prompts that begin like one of before."""
        return statistics.median(self.cached_s)

    @property
    def ratio(self) -> float:
        """Median over the rounds of how many times sooner the cached prompt's token came."""
        return statistics.median(cold / cached for cold, cached in zip(self.cold_s, self.cached_s, strict=True))

    @property
    def hit_rate(self) -> float:
        """Share of the cached prompts' tokens that were found, by the server's metrics."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0


def first_token_s(stub: generation_pb2_grpc.GenerationServiceStub, prompt: list[int]) -> float:
    """Seconds from the call to its first token; the call is read to its end."""
    start = time.perf_counter()
    first: float | None = None
    for response in stub.GenerateStream(stream_request(Request(prompt, 1)), timeout=TIMEOUT_S):
        if first is None and response.HasField("delta"):
            first = time.perf_counter() - start
    if first is None:
        raise RuntimeError("the server answered without a token")
    return first


def measure(server: ServerProcess, lengths: Sequence[int], num_rounds: int) -> list[PrefixResult]:
    """One round more for each length than counted, so that no first call is timed."""
    rng = random.Random("prefix")
    found = []
    with grpc.insecure_channel(server.address, CHANNEL_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for length in lengths:
            result = PrefixResult(length)
            for index in range(num_rounds + 1):
                prompt = _random_ids(rng, length)
                shared = prompt[: int(SHARED * length)]
                cold_s = first_token_s(stub, prompt)
                queries, hits = server.counted(QUERIES, HITS)
                cached_s = first_token_s(stub, [*shared, *_random_ids(rng, length - len(shared))])
                queries_after, hits_after = server.counted(QUERIES, HITS)
                if index:
                    result.cold_s.append(cold_s)
                    result.cached_s.append(cached_s)
                    result.num_queries += queries_after - queries
                    result.num_hits += hits_after - hits
            say(f"{length} tokens: {result.ratio:.1f} times sooner")
            found.append(result)
    return found


def _random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, VOCAB_SIZE - FIRST_ID) for _ in range(length)]


def render_page(found: Sequence[PrefixResult], facts: dict[str, object]) -> str:
    """The table for people."""
    head = ("prompt", "first token, new prompt, ms", "first token, 90 % shared, ms", "times sooner", "hit rate")
    rows = [
        (
            f"{result.length} tokens",
            f"{1000 * result.cold_median_s:.1f}",
            f"{1000 * result.cached_median_s:.1f}",
            f"{result.ratio:.1f}",
            f"{result.hit_rate:.1%}",
        )
        for result in found
    ]
    num_rounds = len(found[0].cold_s)
    return (
        "# A shared beginning\n\n"
        f"`python -m bench.prefix`: a random Cohere checkpoint of 107 million parameters in float32 through gRPC, "
        f"{NUM_THREADS} threads, medians of {num_rounds} rounds. Each round sends a new random prompt, then one that "
        "shares its first 90 %; only whole blocks of 16 tokens are shared.\n\n"
        f"Machine: {results.facts_line(facts)}\n\n{results.markdown_table(head, rows)}"
    )


def main(argv: Sequence[str]) -> int:
    """Runs, prints the page, and keeps it unless --quick."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of the shortest prompt, no file written")
    parser.add_argument("--rounds", type=int, default=9)
    flags = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that the server is stopped too.
    lengths, num_rounds = (LENGTHS[:1], 1) if flags.quick else (LENGTHS, max(1, flags.rounds))
    with tempfile.TemporaryDirectory(prefix="cohort-bench-") as folder:
        say("drawing a random checkpoint")
        num_parameters = write_checkpoint(Path(folder), GEOMETRY)
        server_flags = ["--dtype", "float32", "--max-num-seqs", "8", "--log-level", "warning"]
        with ServerProcess(Path(folder), server_flags, NUM_THREADS) as server:
            found = measure(server, lengths, num_rounds)
    facts = {} if flags.quick else cpu_facts()
    page = render_page(found, facts)
    sys.stdout.write(page)
    if not flags.quick:
        data = [dataclasses.asdict(result) | {"ratio": result.ratio, "hit_rate": result.hit_rate} for result in found]
        kept = {"machine": facts, "num_parameters": num_parameters, "prefix": data}
        say(f"kept in {results.save('prefix', page, kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
