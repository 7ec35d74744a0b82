"""The noise against Random123's known answers, a scalar implementation in plain Python, and the softmax."""

from __future__ import annotations

import math

import numpy as np
import torch

from shard_server import noise

MASK = 0xFFFFFFFF


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & MASK, (a >> 32) ^ counter[3] ^ key[1], a & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def scalar_gumbel(seed: int, position: int, token_id: int) -> float:
    word = scalar_philox([token_id >> 2, position, 0, 0], [seed & MASK, seed >> 32])[token_id & 3]
    uniform = min(float(np.float32((word >> 8) + 0.5)) * 2.0**-24, 1 - 2.0**-24)
    return -math.log(-math.log(uniform))


def words(values: list[int]) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


def test_philox_gives_the_published_answers() -> None:
    # kat_vectors of Random123 for philox4x32 with 10 rounds.
    cases = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, answer in cases:
        assert scalar_philox(counter, key) == answer
        got = noise.philox(tuple(words(counter)), tuple(words(key)))  # type: ignore[arg-type]
        assert [int(word) for word in got] == answer


def test_noise_is_that_of_the_definition_for_every_word_and_any_seed() -> None:
    generator = np.random.default_rng(0)
    seeds = [0, 1, 2**63, 2**64 - 1, *generator.integers(0, 2**63, 4).tolist()]
    positions = [0, 1, 131071, *generator.integers(0, 131072, 5).tolist()]
    for seed, position in zip(seeds, positions, strict=True):
        bits = torch.tensor(np.array([seed], np.uint64).view(np.int64))
        ids = [0, 1, 2, 3, 4, 255_999, *generator.integers(0, 256_000, 6).tolist()]
        got = noise.gumbel(bits, torch.tensor([position]), torch.tensor(ids))
        expected = [scalar_gumbel(seed, position, token_id) for token_id in ids]
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_range_of_ids_has_the_noise_of_its_ids_wherever_it_starts() -> None:
    seeds, positions = torch.tensor([5, -7]), torch.tensor([0, 9])
    for first, size in [(0, 8), (1, 5), (6, 3), (604, 605)]:
        ids = torch.arange(first, first + size)
        expected = noise.gumbel(seeds[:, None], positions[:, None], ids)
        assert torch.equal(noise.gumbel_range(seeds, positions, first, size), expected)


def test_noise_stays_within_the_bounds_that_pruning_relies_on() -> None:
    extremes = noise._from_words(torch.tensor([0, 0xFFFFFFFF]))
    assert noise.SMALLEST_NOISE < extremes[0] < extremes[1] < noise.LARGEST_NOISE


def test_the_arg_max_with_noise_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    num_draws = 40_000
    scores = logits + noise.gumbel_range(torch.full((num_draws,), 42), torch.arange(num_draws), 0, 5)
    counts = torch.bincount(scores.argmax(dim=1), minlength=5).double()
    expected = torch.softmax(logits.double(), 0) * num_draws
    # Chi-square with 4 degrees of freedom exceeds 23.5 once in 10,000 fair draws; seed and positions are fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 23.5
