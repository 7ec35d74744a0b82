"""A paged cache full of NaN but for what the sequences hold, and attention over it in plain float64 maths."""

import dataclasses

import torch


@dataclasses.dataclass
class PagedCache:
    """Blocks of every sequence lie scattered; block 0 belongs to none."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged_cache(
    context_lens: list[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
) -> PagedCache:
    blocks_of = [-(-length // block_size) for length in context_lens]
    free = (torch.randperm(sum(blocks_of)) + 1).tolist()
    shape = (sum(blocks_of) + 1, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full((2, *shape), float("nan"), dtype=dtype)
    tables = torch.zeros((len(context_lens), max(blocks_of) + 1), dtype=torch.int32)
    keys, values = [], []
    for row, length in enumerate(context_lens):
        ids = [free.pop() for _ in range(blocks_of[row])]
        tables[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        k, v = torch.randn(2, length, num_kv_heads, head_dim).to(dtype)
        for number, block in enumerate(ids):
            part = slice(number * block_size, min((number + 1) * block_size, length))
            k_cache[block, : part.stop - part.start] = k[part]
            v_cache[block, : part.stop - part.start] = v[part]
        keys.append(k)
        values.append(v)
    return PagedCache(k_cache, v_cache, tables, keys, values)


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """query `[n, Hq, D]`, the last n positions of keys and values `[context, Hkv, D]`; float64 `[n, Hq, D]`."""
    num_queries, num_heads, head_dim = query.shape
    context, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    k = keys.double().repeat_interleave(group, dim=1)
    v = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) / head_dim**0.5
    q_position = torch.arange(context - num_queries, context)[:, None]
    k_position = torch.arange(context)[None, :]
    is_seen = k_position <= q_position
    if window is not None:
        is_seen &= k_position > q_position - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, float("-inf")).softmax(-1), v)


def columns(num_rows: int, width: int, dtype: torch.dtype = torch.float32, fill: float | None = None) -> torch.Tensor:
    """A `[num_rows, width]` column view of something wider, random or filled."""
    whole = torch.randn(num_rows, width + 48).to(dtype) if fill is None else torch.full((num_rows, width + 48), fill)
    return whole.to(dtype)[:, 16 : 16 + width]
