"""The engine without its network side, on a link that answers by script."""

import asyncio

import pytest

from bench.offline import OfflineRouter, WatchedLink
from bench.router_step import (
    FIRST_TOKEN,
    NUM_STEPS,
    WARM_STEPS,
    ScriptedLink,
    byte_detokenizer,
    measure_apart,
    measure_steps,
    scripted_info,
)
from bench.workloads import Request
from router.shard_client import ShardLost
from router.step import StepResult


class LostLink(ScriptedLink):
    async def receive(self) -> StepResult:
        raise ShardLost(0, "it fell over")


async def test_every_request_gets_its_own_tokens_exactly_as_many_as_asked() -> None:
    link = WatchedLink(ScriptedLink(scripted_info(2)))
    router = OfflineRouter(link, byte_detokenizer, run_ahead=1)
    router.start()
    outputs = await router.generate([Request([1, 2], 3), Request([3], 3)])
    again = await router.generate([Request([4], 2)])
    await router.stop()
    # The link samples FIRST_TOKEN + place in the step; both requests run from the first step on.
    assert outputs == [[FIRST_TOKEN] * 3, [FIRST_TOKEN + 1] * 3]
    assert again == [[FIRST_TOKEN] * 2]
    assert link.num_steps == 3 + 2


async def test_idle_time_counts_only_between_steps_that_follow_each_other() -> None:
    link = WatchedLink(ScriptedLink(scripted_info(1), step_s=0.5, idle_s=0.25))
    router = OfflineRouter(link, byte_detokenizer, run_ahead=1)
    router.start()
    for _ in range(2):
        await router.generate([Request([1], 5)])
    await router.stop()
    # Two runs of five steps; the first one of each came after a pause.
    assert (link.step_s, link.idle_s) == (10 * 0.5, 8 * 0.25)
    link.forget()
    assert (link.num_steps, link.step_s, link.idle_s) == (0, 0.0, 0.0)


async def test_a_lost_shard_ends_the_batch_with_its_error() -> None:
    router = OfflineRouter(LostLink(scripted_info(1)), byte_detokenizer, run_ahead=1)
    router.start()
    with pytest.raises(ShardLost, match="it fell over"):
        await asyncio.wait_for(router.generate([Request([1], 2)]), 10)
    await router.stop()


def test_cost_can_be_taken_in_a_process_of_its_own() -> None:
    costs = measure_apart([1, 2])
    assert [cost.num_rows for cost in costs] == [1, 2] and all(cost.step_us > 0 for cost in costs)


def test_cost_of_a_step_is_taken_over_full_decode_steps() -> None:
    cost = measure_steps(3)
    assert cost.num_rows == 3 and cost.step_us > 0
    assert WARM_STEPS < NUM_STEPS
