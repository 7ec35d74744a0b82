import pytest
import torch

from model.kernels.decode_attention import SplitWorkspace, decode_attention, num_decode_splits
from tests.model.kernels.paged import columns, paged_cache, plain_attention


def check(
    context_lens: list[int],
    block_size: int = 16,
    group: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    window: int | None = None,
    num_splits: int = 1,
    block_n: int = 32,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
) -> None:
    cache = paged_cache(context_lens, num_kv_heads, head_dim, block_size, dtype)
    width = group * num_kv_heads * head_dim
    query, out = columns(len(context_lens), width, dtype), columns(len(context_lens), width, dtype, float("nan"))
    workspace = SplitWorkspace.create(group, head_dim, "cpu")
    workspace.partial_out.fill_(float("nan"))
    for _ in range(2):  # the first launch must leave the counts of arrivals as it found them
        out.fill_(float("nan"))
        decode_attention(
            query,
            cache.k_cache,
            cache.v_cache,
            cache.block_tables,
            torch.tensor(context_lens, dtype=torch.int32),
            window,
            out,
            num_splits,
            workspace,
            block_n=block_n,
        )
    for row, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        expected = plain_attention(query[row].view(1, -1, head_dim), keys, values, window)
        torch.testing.assert_close(out[row].view(1, -1, head_dim).double(), expected, atol=tolerance, rtol=tolerance)
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_mixed_contexts_at_block_and_tile_borders(block_size: int, num_splits: int) -> None:
    check([1, 16, 31, 32, 33, 256, 257], block_size, num_splits=num_splits)


@pytest.mark.parametrize("group", [1, 8, 20])
def test_any_number_of_heads_to_a_kv_head(group: int) -> None:
    check([1, 45], group=group, num_splits=2)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_head_sizes_also_those_that_are_no_power_of_two(head_dim: int) -> None:
    check([40, 7], head_dim=head_dim, num_splits=2)


@pytest.mark.parametrize("window", [1, 32, 33, 50, 1000])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_window_counts_the_query_itself(window: int, num_splits: int) -> None:
    check([1, 32, 50, 99], window=window, num_splits=num_splits)


def test_more_splits_than_tiles_leave_parts_without_keys() -> None:
    check([1, 33, 65], num_splits=16)


def test_a_tile_larger_than_a_block_gathers_its_blocks() -> None:
    check([1, 16, 70, 130], block_size=16, block_n=64, num_splits=2)


def test_bfloat16_is_as_good_as_its_inputs() -> None:
    check([5, 64, 90], num_splits=2, dtype=torch.bfloat16, tolerance=2e-2)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # block 0 holds NaN here
def test_padding_rows_of_block_zero_do_not_fault() -> None:
    cache = paged_cache([40], 2, 64, 16)
    tables = torch.cat((cache.block_tables, torch.zeros_like(cache.block_tables)))
    query, out = columns(2, 8 * 64), columns(2, 8 * 64, fill=float("nan"))
    lengths = torch.tensor([40, 1], dtype=torch.int32)
    workspace = SplitWorkspace.create(4, 64, "cpu")
    decode_attention(query, cache.k_cache, cache.v_cache, tables, lengths, None, out, 4, workspace)
    expected = plain_attention(query[0].view(1, 8, 64), cache.keys[0], cache.values[0], None)
    torch.testing.assert_close(out[0].view(1, 8, 64).double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_splits_always_fit_the_workspace(num_kv_heads: int) -> None:
    available = SplitWorkspace.create(4, 64, "cpu")
    for num_sequences in range(1, 400):
        for longest in (1, 100, 100_000):
            num_splits = num_decode_splits(num_sequences, num_kv_heads, longest)
            rows = num_sequences * num_kv_heads
            assert num_splits == 1 or rows <= available.arrivals.numel()
            assert num_splits == 1 or rows * num_splits * 16 <= available.partial_max.numel()
