"""Memory left for KV blocks, and what is said when nothing is."""

from __future__ import annotations

import pytest

from shard_server.config import ShardConfig
from shard_server.memory import ACTIVATION_MARGIN, GRAPH_BYTES, MemoryUse, explain_graph_shortage, explain_shortage

GIB = 1 << 30
USE = MemoryUse(total=100 * GIB, elsewhere=2 * GIB, weights=20 * GIB, peak=27 * GIB, decode=4 * GIB)


def test_blocks_get_the_wanted_share_less_what_the_largest_step_and_others_take() -> None:
    assert USE.left_for_blocks(0.9, 0) == (90 - 2 - 27) * GIB
    assert USE.left_for_blocks(0.25, 0) < 0


def test_graphs_keep_room_for_their_own_step_and_for_each_of_them() -> None:
    without, graphs = USE.left_for_blocks(0.9, 0), USE.left_for_blocks(0.9, 10)
    assert without - graphs == int(4 * GIB * ACTIVATION_MARGIN) + 10 * GRAPH_BYTES


@pytest.mark.parametrize("flag", ["--max-num-batched-tokens", "--max-num-seqs", "--tensor-parallel-size"])
def test_a_shortage_says_what_to_change(flag: str) -> None:
    config = ShardConfig(max_num_batched_tokens=777, max_num_seqs=55)
    text = str(explain_shortage(config))
    assert flag in text and "777" in text and "55" in text


def test_a_shortage_while_capturing_names_the_flags_that_help() -> None:
    text = str(explain_graph_shortage())
    for flag in ("--gpu-memory-utilization", "--cuda-graph-sizes", "--enforce-eager"):
        assert flag in text
