"""The sampler over the whole vocabulary, against the same noise in float64."""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.clock import distance, normal, replay_s
from bench.kernels.inputs import VOCABULARY
from bench.kernels.report import Report, tried
from model import kernels
from model.kernels.sampling import Samples


def sampling(report: Report) -> None:
    """The sampler over the whole vocabulary."""
    for num_rows in (1, 64, 256):
        tried(f"sampling {num_rows}", partial(one_sampling, report, num_rows))


def one_sampling(report: Report, num_rows: int) -> None:
    """Greedy and drawn tokens, and the torch operations that say the same for greedy rows."""
    logits = normal(num_rows, VOCABULARY, dtype=torch.float32) * 4
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device="cuda")
    positions = torch.randint(0, 100000, (num_rows,), device="cuda")
    num_bytes = 4.0 * logits.numel()
    for heat, has_logsumexp in ((0.0, False), (0.7, False), (0.7, True)):
        temperature = torch.full((num_rows,), heat, device="cuda")
        out = Samples.create(num_rows, has_logsumexp, "cuda")

        def draw(_: int, temperature: torch.Tensor = temperature, out: Samples = out) -> None:
            kernels.sample(logits, temperature, seeds, positions, out)

        seconds = replay_s(draw)
        noisy = logits.double()
        if heat:
            noisy = noisy / heat + gumbel(seeds, positions, VOCABULARY)
        winners = noisy.gather(1, out.tokens.long()[:, None])
        error = float((noisy.max(1, keepdim=True).values - winners).max())  # 0 up to near ties
        if out.logsumexp is not None:
            error += distance(out.logsumexp, logits.double().logsumexp(1))
        name = f"triton t={heat}" + (" logsumexp" if has_logsumexp else "")
        report.add("sampling", f"R={num_rows}", name, seconds, num_bytes, "TB/s", error)
        del noisy
    report.add(
        "sampling", f"R={num_rows}", "torch argmax", replay_s(lambda _: logits.argmax(1)), num_bytes, "TB/s", None
    )


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Noise of every token `[R, size]` in float64, by Philox4x32-10 in int64 arithmetic."""
    low = 0xFFFFFFFF
    zero = torch.zeros((len(seeds), size // 4), dtype=torch.int64, device=seeds.device)
    c0, c1, c2, c3 = zero + torch.arange(size // 4, device=seeds.device), zero + positions[:, None], zero, zero
    k0, k1 = (seeds & low)[:, None], (seeds >> 32 & low)[:, None]

    def multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """High and low words of a * b, by halves of b since the product passes 63 bits."""
        upper, lower = a * (b >> 16), a * (b & 0xFFFF)
        total = upper + (lower >> 16)
        return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)

    for _ in range(10):
        (high0, low0), (high1, low1) = multiply(0xD2511F53, c0), multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), -1).flatten(1)
    uniform = (((words >> 8).float() + 0.5) * 2.0**-24).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log(uniform.double()))
