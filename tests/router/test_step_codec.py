"""A step's columns say to the shards what the scheduler said."""

from __future__ import annotations

from router.step import BindAdapter, FillTokens, OpenRow, ScheduledRow, Step
from router.step_codec import pack_step
from shard_server.link import decode_step
from tests.fake_shard_server import to_step


def test_every_field_of_a_step_arrives() -> None:
    step = Step(
        7,
        closed_slots=[2, 3],
        opened=[
            OpenRow(2, 9, 2**64 - 1, 0.5, 7, 0.25, 2, 4, (5, 9), adapter_slot=1, num_cached_tokens=8),
            OpenRow(3, 1, 0, 0.0, 0, 1.0, 0, -1, (), adapter_slot=-1, num_cached_tokens=0),
        ],
        filled=[FillTokens(2, 8, (1,)), FillTokens(3, 0, (2, 3))],
        scheduled=[ScheduledRow(2, 8, 1, True, (4, 5, 6)), ScheduledRow(3, 0, 1, False)],
        bindings=[BindAdapter(1, "v1")],
    )
    assert to_step(decode_step(pack_step(step).step)) == step
