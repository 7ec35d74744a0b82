import pytest
import torch

from model.kernels.prefill_attention import prefill_attention
from tests.model.kernels.paged import columns, paged_cache, plain_attention


def check(
    rows: list[tuple[int, int]],
    block_size: int = 16,
    group: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    window: int | None = None,
    block_n: int = 32,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
    use_descriptors: bool = False,
) -> None:
    """`rows`: (cached tokens, new tokens) of each sequence."""
    input_lens = [new for _, new in rows]
    context_lens = [cached + new for cached, new in rows]
    cache = paged_cache(context_lens, num_kv_heads, head_dim, block_size, dtype)
    borders = torch.tensor([0, *input_lens]).cumsum(0)
    width = group * num_kv_heads * head_dim
    query, out = columns(sum(input_lens), width, dtype), columns(sum(input_lens), width, dtype, float("nan"))
    prefill_attention(
        query,
        cache.k_cache,
        cache.v_cache,
        cache.block_tables,
        borders.int(),
        torch.tensor(context_lens, dtype=torch.int32),
        max(input_lens),
        window,
        out,
        block_m=32,
        block_n=block_n,
        use_descriptors=use_descriptors,
    )
    for row, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        part = slice(int(borders[row]), int(borders[row + 1]))
        expected = plain_attention(query[part].reshape(part.stop - part.start, -1, head_dim), keys, values, window)
        actual = out[part].reshape(expected.shape).double()
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_whole_prompts_of_mixed_lengths(block_size: int) -> None:
    check([(0, 1), (0, 31), (0, 32), (0, 33), (0, 65)], block_size)


@pytest.mark.parametrize("block_size", [16, 256])
def test_chunks_see_what_the_cache_holds(block_size: int) -> None:
    check([(1, 2), (31, 33), (32, 32), (40, 5), (64, 1)], block_size)


@pytest.mark.parametrize("window", [None, 20])
def test_tiles_read_through_descriptors(window: int | None) -> None:
    check([(0, 33), (40, 30), (31, 64)], block_size=32, num_kv_heads=2, window=window, use_descriptors=True)


@pytest.mark.parametrize("window", [1, 16, 33, 70, 500])
def test_a_window_counts_the_query_itself(window: int) -> None:
    check([(0, 40), (70, 50), (33, 64)], window=window)


def test_a_window_narrower_than_a_tile_of_queries() -> None:
    check([(128, 64)], window=5, block_n=16)


@pytest.mark.parametrize("group", [1, 4])
def test_query_heads_read_the_kv_head_of_their_group(group: int) -> None:
    check([(3, 20)], group=group, num_kv_heads=2)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_head_sizes_also_those_that_are_no_power_of_two(head_dim: int) -> None:
    check([(20, 40)], head_dim=head_dim)


def test_a_tile_larger_than_a_block_gathers_its_blocks() -> None:
    check([(0, 70), (65, 40)], block_size=16, block_n=64)


def test_bfloat16_is_as_good_as_its_inputs() -> None:
    check([(20, 50)], dtype=torch.bfloat16, tolerance=2e-2)
