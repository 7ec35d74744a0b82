"""How the flash backend calls flash-attn, with its two functions played in plain maths as flash-attn documents them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.attention import Seqlen
from model.errors import ModelError
from tests.model.kernels.interpreter import interpret_triton
from tests.model.kernels.paged import columns, paged_cache, plain_attention

interpret_triton()

from model.attention import flash  # noqa: E402

HEAD_DIM = 64
BLOCK_SIZE = 256


class PlainFlashAttn:
    """flash_attn_2_cuda's fwd_kvcache and varlen_fwd over a paged cache: arguments by position, `out` filled."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fwd_kvcache(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> None:
        (_, _, lengths, _, _, _, _, tables, _, out, scale, causal, left, right, softcap, _, num_splits) = rest
        assert (scale, causal, left, right, softcap, num_splits) == (HEAD_DIM**-0.5, False, -1, -1, 0.0, 0)
        assert q.shape == out.shape == (len(lengths), q.shape[1], k_cache.shape[2], HEAD_DIM)
        for row, length in enumerate(lengths.tolist()):
            keys, values = (gather(cache, tables[row], length) for cache in (k_cache, v_cache))
            for member in range(q.shape[1]):  # every query of the row sees the whole context
                out[row, member] = plain_attention(q[row, member : member + 1], keys, values, None)[0]
        self.calls.append("decode")

    def varlen_fwd(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> None:
        (out, borders, _, lengths, _, tables, _, max_q, max_k, dropout, scale, _, causal, left, right, *_) = rest
        assert (dropout, scale, causal) == (0.0, HEAD_DIM**-0.5, True)
        assert max_k >= int(lengths.max())
        assert max_q >= int(borders.diff().max())
        for row, length in enumerate(lengths.tolist()):
            keys, values = (gather(cache, tables[row], length) for cache in (k_cache, v_cache))
            part = slice(int(borders[row]), int(borders[row + 1]))
            window = None if (left, right) == (-1, -1) else left + 1
            out[part] = plain_attention(q[part], keys, values, window).to(out.dtype)
        self.calls.append("prefill")


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return cache[table.long()].flatten(0, 1)[:length]


class Geometry:
    head_dim = HEAD_DIM


Make = Callable[[], tuple[flash.FlashAttention, PlainFlashAttn]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def build() -> tuple[flash.FlashAttention, PlainFlashAttn]:
        kernels = PlainFlashAttn()
        monkeypatch.setattr(flash, "load_flash_attn", lambda: kernels)
        return flash.FlashAttention(Geometry()), kernels  # type: ignore[arg-type]

    return build


@pytest.mark.parametrize(
    ("cached", "new", "window", "calls"),
    [
        ([9, 300, 0], [1, 1, 1], None, ["decode"]),
        ([9, 300, 0], [1, 1, 1], 301, ["decode"]),  # a window that hides nothing is none
        ([9, 300, 0], [1, 1, 1], 300, []),  # our own kernel
        ([3, 260, 0, 37], [1, 1, 50, 2], None, ["decode", "prefill"]),
        ([3, 260, 0, 37], [1, 1, 50, 2], 40, ["prefill"]),
        ([0, 20], [33, 5], None, ["prefill"]),
    ],
)
def test_a_step_of_single_and_longer_rows(
    cached: list[int], new: list[int], window: int | None, calls: list[str], make: Make
) -> None:
    backend, kernels = make()
    context = [old + add for old, add in zip(cached, new, strict=True)]
    cache = paged_cache(context, 2, HEAD_DIM, BLOCK_SIZE)
    num_decode = sum(length == 1 for length in new)
    seqlen = Seqlen(
        input_lengths=torch.tensor(new, dtype=torch.int32),
        cache_lengths=torch.tensor(cached, dtype=torch.int32),
        context_lengths=torch.tensor(context, dtype=torch.int32),
        num_decode_rows=num_decode,
        max_input_len=max(new),
        max_context_len=max(context),
    )
    borders = torch.tensor([0, *new]).cumsum(0).int()
    query = columns(sum(new), 8 * HEAD_DIM)
    out = columns(sum(new), 8 * HEAD_DIM, fill=float("nan"))
    cu_seqlens_q = None if num_decode == len(new) else borders
    backend.forward(query, cache.k_cache, cache.v_cache, cache.block_tables, cu_seqlens_q, seqlen, window, out)
    assert kernels.calls == calls
    for row, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        part = slice(int(borders[row]), int(borders[row + 1]))
        expected = plain_attention(query[part].reshape(-1, 8, HEAD_DIM), keys, values, window)
        torch.testing.assert_close(out[part].reshape(expected.shape).double(), expected, atol=2e-6, rtol=2e-6)


def test_a_block_size_that_flash_attn_refuses_is_named_at_once() -> None:
    with pytest.raises(ModelError, match="multiple of 256, not 16"):
        flash.FlashAttention(Geometry(), 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("found", ["2.6.3", "3.0.0"])
def test_another_version_of_flash_attn_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "version", lambda name: found)
    with pytest.raises(ModelError, match=f"flash-attn {found} is not supported"):
        flash.load_flash_attn()
