"""The device sampler against a scalar Philox4x32-10 written here from its paper."""

import math

import numpy as np
import pytest
import torch

from model.kernels.sampling import CHUNK, Samples, sample

INF, NAN = float("inf"), float("nan")
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def word_of(seed: int, position: int, token: int) -> int:
    return philox((token >> 2, position, 0, 0), (seed & WORD, seed >> 32 & WORD))[token & 3]


def gumbel(seed: int, position: int, token: int) -> float:
    u = (np.float32(word_of(seed, position, token) >> 8) + np.float32(0.5)) * np.float32(2.0**-24)
    return -math.log(-math.log(min(float(u), 1 - 2.0**-24)))


def draw(
    logits: torch.Tensor, temperature: list[float], seeds: list[int], positions: list[int], first_token: int = 0
) -> Samples:
    out = Samples.create(logits.shape[0], True, "cpu")
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    sample(logits, torch.tensor(temperature), torch.tensor(signed), torch.tensor(positions), out, first_token)
    return out


def test_the_scalar_philox_gives_the_published_known_answers() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((WORD,) * 4, (WORD,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("seed", [0, 1, 0x0123456789ABCDEF, (1 << 64) - 1])
@pytest.mark.parametrize("position", [0, 131071])
def test_noise_is_the_defined_function_of_seed_position_and_token(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 3, 2049, CHUNK, CHUNK + 906]
    logits = torch.full((len(tokens), CHUNK + 1000), -INF)
    for row, token in enumerate(tokens):
        logits[row, token] = 1.5
    out = draw(logits, [0.5] * len(tokens), [seed] * len(tokens), [position] * len(tokens))
    assert out.tokens.tolist() == tokens
    expected = torch.tensor([1.5 / 0.5 + gumbel(seed, position, token) for token in tokens])
    torch.testing.assert_close(out.values, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("token", [200513, 224207])
def test_noise_stays_finite_at_both_ends_of_the_unit_interval(token: int) -> None:
    position = {200513: 141, 224207: 15}[token]
    assert word_of(0, position, token) >> 8 in (0, 0xFFFFFF)
    first = token // 4 * 4
    out = draw(torch.tensor([[0.0 if first + i == token else -INF for i in range(4)]]), [1.0], [0], [position], first)
    assert out.tokens.tolist() == [token]
    assert float(out.values) == pytest.approx(gumbel(0, position, token), rel=1e-6)


def test_the_token_is_the_arg_max_of_scaled_logits_and_noise() -> None:
    logits = torch.randn(6, 300) * 3
    seeds, positions = [9, 9, 10, 9, 2**63 + 5, 0], [4, 5, 4, 4, 1, 2]
    temperature = [0.3, 1.0, 2.0, 0.0, 0.9, 1.0]
    out = draw(logits, temperature, seeds, positions)
    for row in range(6):
        heat = temperature[row]
        noisy = [
            float(x) if heat == 0 else float(x) / heat + gumbel(seeds[row], positions[row], token)
            for token, x in enumerate(logits[row])
        ]
        best, second = sorted(noisy, reverse=True)[:2]
        assert best - second > 1e-4  # a near tie would say nothing
        assert int(out.tokens[row]) == noisy.index(best)


def test_a_row_alone_and_in_a_batch_gives_the_same_token() -> None:
    logits = torch.randn(5, 5000)
    seeds, positions = [3, 3, 4, 5, 6], [7, 8, 9, 10, 11]
    together = draw(logits, [1.0] * 5, seeds, positions)
    for row in range(5):
        alone = draw(logits[row : row + 1], [1.0], [seeds[row]], [positions[row]])
        assert torch.equal(alone.tokens, together.tokens[row : row + 1])
        assert torch.equal(alone.values, together.values[row : row + 1])


@pytest.mark.parametrize("places", [(2, 5), (2047, 2048), (CHUNK - 1, CHUNK), (10, CHUNK + 3)])
def test_among_equal_logits_greedy_takes_the_lowest_token(places: tuple[int, int]) -> None:
    logits = torch.zeros(1, CHUNK + 100)
    logits[0, list(places)] = 3.0
    assert draw(logits, [0.0], [1], [1]).tokens.tolist() == [places[0]]


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")  # unsound rows' logsumexp
def test_rows_without_a_sound_maximum_are_marked_and_give_token_zero() -> None:
    logits = torch.randn(6, CHUNK + 50)
    logits[1, CHUNK + 7] = NAN
    logits[2, 3] = INF
    logits[3] = -INF
    logits[4, 5:] = -INF  # masked for the greater part, but sound
    out = draw(logits, [0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [1] * 6, [1] * 6)
    assert out.is_finite.tolist() == [True, False, False, False, True, True]
    assert out.tokens[1:4].tolist() == [0, 0, 0]
    assert int(out.tokens[4]) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logsumexp_is_of_the_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, CHUNK + 77) * 10).to(dtype)
    logits[:, :100] = -INF
    logits[1, :] = -INF
    logits[1, CHUNK + 76] = 80.0
    out = draw(logits, [0.5, 1.0, 0.0], [1, 2, 3], [1, 2, 3])
    assert out.logsumexp is not None
    torch.testing.assert_close(out.logsumexp.double(), logits.double().logsumexp(-1), atol=1e-4, rtol=1e-6)
    assert int(out.tokens[2]) == int(logits[2].float().argmax())


def test_shards_of_the_vocabulary_agree_with_the_whole() -> None:
    logits = torch.randn(4, 600)
    temperature, seeds, positions = [1.0, 0.7, 0.0, 1.0], [5, 6, 7, 8], [1, 2, 3, 4]
    whole = draw(logits, temperature, seeds, positions)
    left = draw(logits[:, :352], temperature, seeds, positions)
    right = draw(logits[:, 352:], temperature, seeds, positions, first_token=352)
    assert torch.equal(torch.where(left.values >= right.values, left.tokens, right.tokens), whole.tokens)
