"""Tilings of the adapters' kernels that are measured beside the default ones."""

from __future__ import annotations

import dataclasses

from model.kernels.lora import DECODE_TOKENS, FEW_TOKENS, LoraTilings, lora_tilings
from model.kernels.lora_expand import ExpandTiling
from model.kernels.lora_shrink import ShrinkTiling

RANK = 16
ROWS, TILES, PROMPTS = (lora_tilings(number, RANK) for number in (1, FEW_TOKENS + 1, DECODE_TOKENS + 1))

_SHRINKS = {
    "rows in": [(1, 1, 2048, 2048), (1, 2, 2048, 2048), (1, 2, 4096, 4096), (1, 4, 1024, 1024)],
    "rows out": [(1, 1, 1024, 1024), (1, 1, 4096, 4096), (1, 2, 2048, 2048), (1, 4, 1024, 1024)],
    "tiles in": [(16, 16, 128, 512), (16, 16, 256, 2048), (16, 32, 128, 1024), (16, 128, 128, 512), (16, 128, 64, 256)],
    "tiles out": [(16, 16, 128, 512), (16, 16, 128, 1024), (16, 16, 256, 2048), (16, 16, 256, 512)],
    "prompts in": [(64, 128, 64, 4096, 4, 4), (64, 128, 64, 1024), (128, 128, 64, 2048, 8), (64, 16, 128, 4096)],
    "prompts out": [
        (64, 16, 128, 2048, 4, 4),
        (64, 16, 64, 4096, 4, 4),
        (128, 16, 64, 4096, 4, 4),
        (32, 16, 256, 4096),
    ],
}
"""Tokens, rows of A, depth of a tile, depth of a program, warps, stages."""
_EXPANDS = {
    "rows in": [(1, 128), (1, 512), (1, 512, 8), (1, 128, 2)],
    "rows out": [(1, 16, 1), (1, 32, 1), (1, 64, 2), (1, 64)],
    "tiles in": [(16, 128), (16, 512), (16, 512, 8), (32, 256)],
    "tiles out": [(16, 32, 2), (16, 64, 2), (16, 128), (32, 64)],
    "prompts in": [(128, 128, 8), (64, 256, 8), (32, 256), (16, 512)],
    "prompts out": [(128, 128, 8), (64, 256, 8), (32, 256), (16, 256)],
}
"""Tokens, columns, warps."""
FIELDS = ("shrink_in", "expand_in", "shrink_out", "expand_out")


def kind_of(num_tokens: int) -> str:
    """Which list a step of so many tokens has."""
    if num_tokens <= FEW_TOKENS:
        return "rows"
    return "tiles" if num_tokens <= DECODE_TOKENS else "prompts"


def tilings_of(kind: str, field: str) -> list[ShrinkTiling | ExpandTiling]:
    """The default one first, then others."""
    default = getattr({"rows": ROWS, "tiles": TILES, "prompts": PROMPTS}[kind], field)
    name = f"{kind} {field.split('_')[1]}"
    if isinstance(default, ShrinkTiling):
        others: list[ShrinkTiling | ExpandTiling] = [ShrinkTiling(*numbers) for numbers in _SHRINKS[name]]
    else:
        others = [ExpandTiling(*numbers) for numbers in _EXPANDS[name]]
    return [default, *(tiling for tiling in others if tiling != default)]


def text_of(tiling: ShrinkTiling | ExpandTiling) -> str:
    """For the table."""
    if isinstance(tiling, ExpandTiling):
        return f"{tiling.block_t}x{tiling.block_n} w{tiling.num_warps}"
    size = f"{tiling.block_t}x{tiling.block_n}x{tiling.block_k}/{tiling.part}"
    return f"{size} w{tiling.num_warps} s{tiling.num_stages}"


def in_turn(tilings: LoraTilings) -> LoraTilings:
    """The same with shrinks that read nothing before the kernel before them has ended."""
    late = [dataclasses.replace(shrink, is_early=False) for shrink in (tilings.shrink_in, tilings.shrink_out)]
    return dataclasses.replace(tilings, shrink_in=late[0], shrink_out=late[1])
