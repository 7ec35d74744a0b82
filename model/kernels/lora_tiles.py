"""Which tokens and which columns a program of the adapters' kernels works on, found on the device.

token_order      slot 0's tokens | slot 2's tokens      | slot 5's | tokens of the base model
tiles of tokens  [  0  ][  1  ]   [  2  ][  3  ][  4  ]  [  5  ]    none
"""

from __future__ import annotations

import triton.language as tl

from model.kernels.jit import ceil_div, jit


@jit
def find_tile(
    tile: tl.tensor,
    segment_starts: tl.tensor,
    MAX_LORAS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The tile's adapter slot and its place in `token_order`: from, and where its segment stops; 0 and 0 if none."""
    slot = tl.arange(0, BLOCK_L)
    is_slot = slot < MAX_LORAS
    begin = tl.load(segment_starts + slot, mask=is_slot, other=0)
    end = tl.load(segment_starts + slot + 1, mask=is_slot, other=0)
    tiles = (end - begin + BLOCK_T - 1) // BLOCK_T
    last = tl.cumsum(tiles, 0)
    chosen = tl.sum((last <= tile).to(tl.int32), 0)  # an empty slot ends where the one before it does
    is_chosen = slot == chosen
    first = tl.sum(tl.where(is_chosen, begin + (tile - last + tiles) * BLOCK_T, 0), 0)
    stop = tl.sum(tl.where(is_chosen, end, 0), 0)
    return chosen, first, stop


def most_tiles(num_tokens: int, max_loras: int, block_t: int) -> int:
    """Tiles that any assignment of tokens to slots needs at most: each slot in use wastes less than one."""
    num_slots = min(num_tokens, max_loras)
    return (num_tokens - num_slots) // block_t + num_slots


@jit
def find_columns(
    tile: tl.tensor,
    FIRST: tl.constexpr,
    PAIR: tl.constexpr,
    LAST_PAIR: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A column tile's module, its first column, and where the module's columns stop; no tile straddles two modules.

    Modules are FIRST columns wide, then twice PAIR, then twice LAST_PAIR: q | k | v | gate | up, or one alone.
    """
    first_tiles: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
    pair_tiles: tl.constexpr = (PAIR + BLOCK_N - 1) // BLOCK_N
    last_tiles: tl.constexpr = (LAST_PAIR + BLOCK_N - 1) // BLOCK_N
    is_1 = (tile >= first_tiles).to(tl.int32)
    is_2 = (tile >= first_tiles + pair_tiles).to(tl.int32)
    is_3 = (tile >= first_tiles + 2 * pair_tiles).to(tl.int32)
    is_4 = (tile >= first_tiles + 2 * pair_tiles + last_tiles).to(tl.int32)
    start = is_1 * FIRST + (is_2 + is_3) * PAIR + is_4 * LAST_PAIR
    size = FIRST + is_1 * (PAIR - FIRST) + is_3 * (LAST_PAIR - PAIR)
    earlier = is_1 * first_tiles + (is_2 + is_3) * pair_tiles + is_4 * last_tiles
    return is_1 + is_2 + is_3 + is_4, start + (tile - earlier) * BLOCK_N, start + size


def count_column_tiles(sizes: tuple[int, int, int], block_n: int) -> int:
    """Tiles of `find_columns` for modules of these sizes."""
    first, pair, last = (ceil_div(size, block_n) for size in sizes)
    return first + 2 * pair + 2 * last
