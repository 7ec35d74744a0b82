"""What adapters add to a layer's two products, against float64 maths."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from model.kernels.lora import LoraTilings, add_lora_input, add_lora_output, lora_tilings
from model.kernels.lora_expand import ExpandTiling
from model.kernels.lora_shrink import ShrinkTiling
from model.kernels.lora_tiles import most_tiles
from model.lora import AdapterBatchData
from model.lora_adapter import ModuleSizes
from model.lora_stacks import LoraLayer
from tests.model.kernels.paged import columns

NAN = float("nan")
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
ODD = ModuleSizes(hidden=96, q=40, kv=24, inner=72)
"""No module's columns are a multiple of a tile's."""
EVEN = ModuleSizes(hidden=64, q=64, kv=32, inner=128)
"""All are, so that most masks fall away."""


@dataclasses.dataclass
class Stacks:
    """What the kernels read of LoraStacks, of two layers; a slot's weights are apart from the next slot's."""

    max_rank: int
    max_loras: int
    sizes: ModuleSizes
    ranks: torch.Tensor
    layers: list[LoraLayer]


def make_stacks(slot_ranks: list[tuple[int, ...]], max_rank: int, dtype: torch.dtype, sizes: ModuleSizes) -> Stacks:
    """Random weights within each module's rank, zero beyond it."""
    num_slots = len(slot_ranks)
    ranks = torch.tensor(slot_ranks, dtype=torch.int32).view(num_slots, 7)
    kept = (torch.arange(max_rank) < ranks[:, :, None]).double()  # [slots, 7, max_rank]
    of_column = torch.arange(5).repeat_interleave(torch.tensor(sizes.inputs))
    of_input = torch.arange(5, 7).repeat_interleave(torch.tensor(sizes.outputs))
    masks = [
        kept[:, :5].flatten(1)[:, :, None].expand(-1, -1, sizes.hidden),
        kept[:, of_column],
        kept[:, of_input].transpose(1, 2),
        kept[:, 5:].flatten(1)[:, None, :].expand(-1, sizes.hidden, -1),
    ]
    stacks = [torch.randn(num_slots, 2, *mask.shape[1:]).mul_(mask[:, None]).mul_(0.3).to(dtype) for mask in masks]
    layers = [LoraLayer(*(stack[:, layer] for stack in stacks)) for layer in range(2)]
    return Stacks(max_rank, num_slots, sizes, ranks, layers)


def batch(token_slots: list[int], stacks: Stacks) -> AdapterBatchData:
    packed = pack_columns(token_slots, stacks.max_loras)
    return AdapterBatchData.of_columns(packed, len(token_slots), (), stacks)


def pack_columns(token_slots: list[int], max_loras: int) -> torch.Tensor:
    """In plain Python, so that it depends on nothing that is tested."""
    order = sorted(range(len(token_slots)), key=lambda t: (token_slots[t] % (max_loras + 1), t))
    starts = [sum(0 <= slot < border for slot in token_slots) for border in range(max_loras + 1)]
    return torch.tensor([*token_slots, *order, *starts], dtype=torch.int32)


def expected_input(normed: torch.Tensor, projected: torch.Tensor, slots: list[int], stacks: Stacks) -> torch.Tensor:
    own, result, rank = stacks.layers[1], projected.double().clone(), stacks.max_rank
    for token, slot in enumerate(slots):
        if slot >= 0:
            low = own.a_in[slot].double() @ normed[token].double()
            blocks = own.b_in[slot].double().split(stacks.sizes.inputs)
            result[token] += torch.cat([b @ low[m * rank : (m + 1) * rank] for m, b in enumerate(blocks)])
    return result


def expected_output(mixed: torch.Tensor, out: torch.Tensor, slots: list[int], stacks: Stacks) -> torch.Tensor:
    own, result, q = stacks.layers[1], out.double().clone(), stacks.sizes.q
    for token, slot in enumerate(slots):
        if slot >= 0:
            a, x = own.a_out[slot].double(), mixed[token].double()
            low = torch.cat([a[:, :q] @ x[:q], a[:, q:] @ x[q:]])
            result[token] += own.b_out[slot].double() @ low
    return result


def check(
    slots: list[int], stacks: Stacks, dtype: torch.dtype, tolerance: float, tilings: LoraTilings | None = None
) -> None:
    """Both sides; columns of something wider that is NaN, which no one may read or write."""
    data, sizes, num_tokens = batch(slots, stacks), stacks.sizes, len(slots)
    sides = [
        (add_lora_input, expected_input, sizes.hidden, sum(sizes.inputs)),
        (add_lora_output, expected_output, sum(sizes.outputs), sizes.hidden),
    ]
    for add, expect, depth, width in sides:
        x, base = columns(num_tokens, depth, dtype), torch.randn(num_tokens, width).to(dtype)
        whole = torch.full((num_tokens, width + 32), NAN, dtype=dtype)
        target = whole[:, 16:-16]
        target.copy_(base)
        add(x, target, data, 1, tilings)
        expected = expect(x, base, slots, stacks)
        torch.testing.assert_close(target.double(), expected, atol=tolerance * 3, rtol=tolerance)
        assert whole[:, :16].isnan().all() and whole[:, -16:].isnan().all()
        is_base = torch.tensor(slots) < 0
        assert torch.equal(target[is_base], base[is_base]), "a base token is not touched, to the bit"


def small_tilings(block_t: int, is_early: bool = True) -> LoraTilings:
    """Two parts or more of each depth, several tiles of each part, and several of each module's columns."""
    shrink = ShrinkTiling(block_t, block_n=32, block_k=16, part=32, num_warps=1, num_stages=2, is_early=is_early)
    expand = ExpandTiling(block_t, block_n=32, num_warps=1)
    return LoraTilings(shrink, expand, shrink, expand)


def full(max_rank: int, num_slots: int = 3) -> list[tuple[int, ...]]:
    return [(max_rank,) * 7] * num_slots


ROWS = [2, -1, 0, 2]
TILES = [2] * 17 + [-1, 0, -1, 2, 0] + [-1]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("block_t", "slots"), [(1, ROWS), (16, TILES)])
@pytest.mark.parametrize("max_rank", [1, 16, 24, 64])
def test_ragged_segments_with_base_tokens_between_and_an_empty_slot(
    max_rank: int, block_t: int, slots: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    check(slots, make_stacks(full(max_rank), max_rank, dtype, ODD), dtype, tolerance, small_tilings(block_t))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("block_t", "slots"), [(1, ROWS), (16, TILES)])
def test_columns_that_tiles_divide(block_t: int, slots: list[int], dtype: torch.dtype, tolerance: float) -> None:
    tilings = small_tilings(block_t, is_early=False)
    check(slots, make_stacks(full(16), 16, dtype, EVEN), dtype, tolerance, tilings)


@pytest.mark.parametrize(("block_t", "slots"), [(1, ROWS), (16, TILES)])
def test_each_module_of_an_adapter_has_a_rank_of_its_own_or_none(block_t: int, slots: list[int]) -> None:
    ranks = [(0, 3, 17, 40, 1, 40, 0), (40,) * 7, (5, 0, 0, 0, 18, 0, 33)]
    check(slots, make_stacks(ranks, 40, torch.float32, ODD), torch.float32, 1e-5, small_tilings(block_t))


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 33, 300])
def test_default_tilings_of_decode_steps(num_tokens: int) -> None:
    slots = [(7 * t) % 5 - 1 for t in range(num_tokens)]
    slots[0] = 3
    check(slots, make_stacks(full(8, 4), 8, torch.bfloat16, ODD), torch.bfloat16, 2e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_default_tilings_of_prompts(dtype: torch.dtype, tolerance: float) -> None:
    slots = [1] * 70 + [-1] * 9 + [0] * 64
    check(slots, make_stacks(full(16), 16, dtype, ODD), dtype, tolerance, lora_tilings(8192, 16))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_one_slot_alone(num_tokens: int) -> None:
    check([0] * num_tokens, make_stacks(full(16, 1), 16, torch.float32, ODD), torch.float32, 1e-5)


@pytest.mark.parametrize("block_t", [1, 16])
def test_nothing_is_read_or_written_for_base_tokens(block_t: int) -> None:
    stacks = make_stacks(full(16), 16, torch.float32, ODD)
    for stack in dataclasses.astuple(stacks.layers[1]):
        stack.fill_(NAN)
    check([-1] * 18, stacks, torch.float32, 0, small_tilings(block_t))


@pytest.mark.parametrize("block_t", [1, 16])
def test_no_other_slots_weights_are_read(block_t: int) -> None:
    stacks = make_stacks(full(16), 16, torch.float32, ODD)
    for stack in dataclasses.astuple(stacks.layers[1]):
        stack[::2].fill_(NAN)
    check([-1, 1, 1], stacks, torch.float32, 1e-5, small_tilings(block_t))


@pytest.mark.parametrize("block_t", [1, 16])
def test_a_launch_serves_any_assignment_that_its_buffer_is_filled_with(block_t: int) -> None:
    """As in a CUDA graph: the columns are views of one buffer, and nothing on the host changes."""
    stacks = make_stacks(full(16), 16, torch.float32, ODD)
    num_tokens = 3 if block_t == 1 else 18
    buffer = pack_columns([-1] * num_tokens, 3)
    data, x = AdapterBatchData.of_columns(buffer, num_tokens, (), stacks), torch.randn(num_tokens, ODD.hidden)
    for slots in ([-1] * num_tokens, [0] * num_tokens, [t % 4 - 1 for t in range(num_tokens)]):
        buffer.copy_(pack_columns(slots, 3))
        target = torch.zeros(num_tokens, sum(ODD.inputs))
        add_lora_input(x, target, data, 1, small_tilings(block_t))
        expected = expected_input(x, torch.zeros_like(target), slots, stacks)
        torch.testing.assert_close(target.double(), expected, atol=1e-4, rtol=1e-5)


def test_a_token_gets_the_same_bits_wherever_it_lies_and_each_time() -> None:
    stacks = make_stacks(full(16), 16, torch.bfloat16, ODD)
    x = torch.randn(1, ODD.hidden).bfloat16().expand(40, -1).contiguous()
    slots = [0] * 3 + [1] * 37
    results = []
    for order in (slots, slots[::-1]):
        target = torch.zeros(40, sum(ODD.inputs), dtype=torch.bfloat16)
        add_lora_input(x, target, batch(order, stacks), 1, small_tilings(16))
        results.append(target[torch.tensor(order) == 1])
    first = results[0][0]
    assert all(torch.equal(row, first) for result in results for row in result)


def test_a_step_without_tokens_launches_nothing() -> None:
    stacks = make_stacks(full(16), 16, torch.float32, ODD)
    add_lora_input(torch.zeros(0, 96), torch.zeros(0, sum(ODD.inputs)), batch([], stacks), 1)
    add_lora_output(torch.zeros(0, sum(ODD.outputs)), torch.zeros(0, 96), batch([], stacks), 1)


@hypothesis.given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    base=st.integers(0, 5),
    block_t=st.sampled_from([1, 16]),
)
def test_there_are_tiles_enough_for_any_assignment_and_one_that_needs_them_all(
    counts: list[int], base: int, block_t: int
) -> None:
    num_tokens, max_loras = sum(counts) + base, len(counts)
    enough = most_tiles(num_tokens, max_loras, block_t)
    assert sum(-(-count // block_t) for count in counts) <= enough
    num_slots = min(num_tokens, max_loras)
    worst = [1] * (num_slots - 1) + [num_tokens - num_slots + 1] if num_tokens else []
    assert sum(-(-count // block_t) for count in worst) == enough


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 512, 513])
@pytest.mark.parametrize("max_rank", [1, 16, 64, 256])
def test_default_tilings_go_together_and_are_powers_of_two(num_tokens: int, max_rank: int) -> None:
    chosen = lora_tilings(num_tokens, max_rank)
    for shrink, expand in ((chosen.shrink_in, chosen.expand_in), (chosen.shrink_out, chosen.expand_out)):
        assert (shrink.block_t == 1) == (expand.block_t == 1) == (num_tokens <= 8)
        for number in (shrink.block_t, shrink.block_n, shrink.block_k, expand.block_t, expand.block_n):
            assert number & (number - 1) == 0 and (number >= 16 or num_tokens <= 8)
