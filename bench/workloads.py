"""The fixed workloads. Prompts are random token ids and output lengths are exact, the same for every engine and run."""

from __future__ import annotations

import dataclasses
import random

FIRST_ID = 16  # Ids below are left to special tokens, and as many at the end.


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the number of tokens to generate for it."""

    prompt: list[int]
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive all at once. `counts_prompt` says that the figure is prompt tokens a second."""

    name: str
    title: str
    requests: list[Request]
    counts_prompt: bool = False

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that the figure counts: the prompts' or the asked outputs'."""
        if self.counts_prompt:
            return sum(len(request.prompt) for request in self.requests)
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together."""
        return max(len(request.prompt) + request.num_output_tokens for request in self.requests)


def _prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocab_size - FIRST_ID) for _ in range(length)]


def _equal(seed: str, count: int, input_len: int, output_len: int, vocab_size: int) -> list[Request]:
    rng = random.Random(seed)
    return [Request(_prompt(rng, input_len, vocab_size), output_len) for _ in range(count)]


def _mixed(
    seed: int | str, count: int, input_lens: tuple[int, int], output_lens: tuple[int, int], vocab_size: int
) -> list[Request]:
    # Each request draws its prompt's length, then the prompt, then the output's length.
    rng = random.Random(seed)
    return [
        Request(_prompt(rng, rng.randint(*input_lens), vocab_size), rng.randint(*output_lens)) for _ in range(count)
    ]


def cpu_workloads(vocab_size: int) -> list[Workload]:
    """What `bench.cpu` runs: a lone request, sixteen equal ones, thirty-two of all lengths, and prompts alone."""
    return [
        Workload("b1", "1 x 64 in / 64 out", _equal("b1", 1, 64, 64, vocab_size)),
        Workload("b16", "16 x 64 in / 64 out", _equal("b16", 16, 64, 64, vocab_size)),
        Workload("mixed", "32 x 16..256 in / 8..64 out", _mixed(0, 32, (16, 256), (8, 64), vocab_size)),
        Workload("prefill", "8 x 512 in / 1 out", _equal("prefill", 8, 512, 1, vocab_size), counts_prompt=True),
    ]


def gpu_workloads(vocab_size: int, max_model_len: int) -> list[Workload]:
    """What `bench.gpu` runs; those that do not fit `max_model_len` are left out.

    The seeds are the long names that the peers were measured with, so the prompts are theirs too.
    """
    all_workloads = [
        Workload("b1", "1 x 128 in / 256 out", _equal("b1_in128_out256", 1, 128, 256, vocab_size)),
        Workload("b64", "64 x 128 in / 256 out", _equal("b64_in128_out256", 64, 128, 256, vocab_size)),
        Workload("b256", "256 x 128 in / 256 out", _equal("b256_in128_out256", 256, 128, 256, vocab_size)),
        Workload(
            "prefill", "64 x 2048 in / 1 out", _equal("prefill_64x2048", 64, 2048, 1, vocab_size), counts_prompt=True
        ),
        Workload("ctx", "16 x 6000 in / 128 out", _equal("ctx_16x6000_out128", 16, 6000, 128, vocab_size)),
        Workload(
            "mixed512", "512 x 64..1024 in / 16..256 out", _mixed("mixed", 512, (64, 1024), (16, 256), vocab_size)
        ),
    ]
    return [workload for workload in all_workloads if workload.longest <= max_model_len]
