"""Which adapters are loaded and bound when, with the real scheduler and shards that check every binding."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest

from router.adapter_places import Tier
from router.errors import Cancelled, FailedPrecondition
from router.messages import RequestDone, Submission
from tests.fake_shards import INFO
from tests.router.adapter_harness import AdapterHarness, adapted, version_of
from tests.router.test_scheduler import expected

NARROW = dataclasses.replace(INFO, max_num_seqs=2)


def run_all(harness: AdapterHarness, requests: Iterable[Submission]) -> None:
    """Everyone gets the tokens of an undisturbed run with the right adapter."""
    requests = list(requests)
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        assert harness.tokens(request.key) == expected(request)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_base_rows_and_adapters_mix_in_one_batch(run_ahead: int) -> None:
    harness = AdapterHarness(run_ahead=run_ahead)
    run_all(harness, [adapted(key, name, max_tokens=6) for key, name in enumerate(["a", None, "b", "a", None], 1)])
    most = max(len({row.slot for row in step.scheduled}) for step in harness.shards.steps)
    assert most == 5 and sorted(harness.loads) == ["v-a", "v-b"]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_more_adapters_than_slots_take_turns(run_ahead: int) -> None:
    harness = AdapterHarness(max_loras=2, max_cpu_loras=3, run_ahead=run_ahead)
    run_all(harness, [adapted(key, f"a{key % 7}", max_tokens=5) for key in range(1, 40)])


def test_at_most_max_loras_adapters_are_in_a_step() -> None:
    harness = AdapterHarness(max_loras=2, max_cpu_loras=8)
    slots: dict[int, int] = {}
    run_all(harness, [adapted(key, f"a{key % 5}", max_tokens=5) for key in range(1, 20)])
    for step in harness.shards.steps:
        slots |= {row.slot: row.adapter_slot for row in step.opened}
        assert len({slots[row.slot] for row in step.scheduled}) <= 2


def test_a_slow_load_holds_up_nobody_else() -> None:
    harness = AdapterHarness(is_auto=False)
    slow, base, other = adapted(1, "slow"), adapted(2, None), adapted(3, "b")
    for request in (slow, base, other):
        harness.add(request)
    assert harness.loading == ["v-slow", "v-b"]
    harness.end_load("v-b")
    for _ in range(20):
        harness.tick()
    assert harness.tokens(2) == expected(base) and harness.tokens(3) == expected(other)
    assert harness.tokens(1) == [] and harness.scheduler.load().num_waiting == 1
    harness.end_load("v-slow")
    harness.run()
    assert harness.tokens(1) == expected(slow)


def test_many_requests_for_a_cold_adapter_load_it_once() -> None:
    harness = AdapterHarness(is_auto=False)
    for key in range(1, 30):
        harness.add(adapted(key, "a"))
        harness.tick()
    assert harness.loading == harness.loads == ["v-a"]
    harness.end_load("v-a")
    harness.run()
    assert all(harness.tokens(key) == expected(adapted(key, "a")) for key in range(1, 30))


def test_a_broken_adapter_ends_only_its_own_requests_and_can_be_tried_again() -> None:
    harness = AdapterHarness(is_auto=False)
    harness.add(adapted(1, "a", max_tokens=20))
    harness.end_load("v-a")
    harness.tick()
    harness.add(adapted(2, "broken"))
    harness.add(adapted(3, None, max_tokens=20))
    harness.tick()
    harness.end_load("v-broken", "lora_A of q_proj has the wrong shape")
    assert isinstance(harness.error(2), FailedPrecondition) and "wrong shape" in str(harness.error(2))
    harness.add(adapted(4, "broken"))
    assert harness.loading == ["v-broken"], "a new request tries again"
    harness.end_load("v-broken")
    harness.run()
    for key, name in ((1, "a"), (3, None)):
        assert harness.tokens(key) == expected(adapted(key, name, max_tokens=20))
    assert harness.tokens(4) == expected(adapted(4, "broken"))


def test_a_pinned_adapter_that_cannot_be_loaded_is_pinned_no_more() -> None:
    harness = AdapterHarness(is_auto=False)
    harness.places.pin("v-a")
    harness.take_orders()
    harness.end_load("v-a", "broken")
    harness.take_orders()
    assert harness.loads == ["v-a"], "nobody asks for it again"


@pytest.mark.parametrize("max_cpu_loras", [1, 4])
def test_a_cold_adapter_does_not_starve_behind_a_hot_one(max_cpu_loras: int) -> None:
    """One slot; a new request for the hot adapter comes at every step, so that it never falls idle by itself."""
    harness = AdapterHarness(max_loras=1, max_cpu_loras=max_cpu_loras)
    key = 1
    for _ in range(5):
        harness.add(adapted(key, "hot", max_tokens=8))
        key += 1
        harness.tick()
    cold = adapted(key, "cold", max_tokens=8)
    harness.add(cold)
    for _ in range(60):
        key += 1
        harness.add(adapted(key, "hot", max_tokens=8))
        harness.tick()
    assert isinstance(harness.events[cold.key][-1], RequestDone), "the cold one waits for ever"
    assert harness.tokens(cold.key) == expected(cold)
    harness.run()


def test_a_slot_that_is_given_up_is_the_one_that_empties_first() -> None:
    harness = AdapterHarness(max_loras=2, run_ahead=0)
    for key, name in enumerate(["a", "a", "a", "b"], 1):
        harness.add(adapted(key, name, max_tokens=30 if name == "a" else 10))
    harness.tick()
    harness.add(adapted(5, "c", max_tokens=2))
    harness.add(adapted(6, "b", max_tokens=2))
    harness.add(adapted(7, "a", max_tokens=2))
    for _ in range(8):
        harness.tick()
    assert harness.running() == ["a", "a", "a", "b"], "a's later request ran, b's has to wait for c's"
    assert isinstance(harness.events[7][-1], RequestDone)
    for _ in range(8):
        harness.tick()
    assert isinstance(harness.events[5][-1], RequestDone) and isinstance(harness.events[6][-1], RequestDone)
    harness.run()


def test_when_the_one_that_waited_for_a_slot_is_cancelled_others_may_start_there_again() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.add(adapted(1, "a", max_tokens=40))
    harness.tick()
    harness.add(adapted(2, "b"))
    harness.tick()
    harness.add(adapted(3, "a"))
    harness.tick()
    assert harness.running() == ["a"]
    harness.collect(harness.scheduler.cancel(2))
    assert isinstance(harness.error(2), Cancelled)
    harness.tick()
    assert harness.running() == ["a", "a"]
    harness.run()


def test_a_slot_is_not_given_on_while_those_it_was_given_to_wait_for_a_row() -> None:
    """All rows are taken; slots must not be bound back and forth meanwhile."""
    harness = AdapterHarness(max_loras=2, info=NARROW, run_ahead=0)
    harness.add(adapted(1, None, max_tokens=30))
    harness.add(adapted(2, "a", max_tokens=30))
    harness.tick()
    for key in range(3, 12):
        harness.add(adapted(key, f"c{key}", max_tokens=2))
    for _ in range(20):
        harness.tick()
    assert sum(len(step.bindings) for step in harness.shards.steps) <= 2
    harness.run()


def test_a_slot_held_by_a_late_sequence_goes_to_an_earlier_one() -> None:
    """The late one has a slot and no row; it must not hold the slot against somebody who goes first."""
    harness = AdapterHarness(max_loras=1, info=NARROW, run_ahead=0, is_auto=False)
    harness.add(adapted(1, "late", priority=1))
    harness.tick()
    for key in (2, 3):
        harness.add(adapted(key, None, max_tokens=10))
    harness.tick()
    harness.end_load("v-late")
    harness.tick()
    assert harness.scheduler.load().num_running == 2 and harness.places.num_parked == 0, "it has a slot and no row"
    harness.add(adapted(4, "urgent", priority=-1))
    harness.end_load("v-urgent")
    for key in range(5, 25):
        harness.add(adapted(key, None, max_tokens=10))
    harness.run()
    order = [row.seed for step in harness.shards.steps for row in step.opened]
    assert order[2] == 4 and order[-1] == 1, "the urgent one has the next row, the late one the last"


def test_an_idle_adapter_keeps_its_slot_until_another_needs_it_the_least_recently_used_first() -> None:
    harness = AdapterHarness(max_loras=2, max_cpu_loras=4)
    for key, name in enumerate(["a", "b", "a", "c", "b"], 1):
        harness.add(adapted(key, name))
        harness.run()
    bound = [binding.version for step in harness.shards.steps for binding in step.bindings]
    assert bound == ["v-a", "v-b", "v-c", "v-b"]
    assert harness.loads == ["v-a", "v-b", "v-c"], "the host still had b"


def test_host_memory_keeps_the_most_recently_used() -> None:
    harness = AdapterHarness(max_loras=1, max_cpu_loras=2)
    for key, name in enumerate(["a", "b", "a", "c", "a", "b"], 1):
        harness.add(adapted(key, name))
        harness.run()
    assert harness.loads == ["v-a", "v-b", "v-c", "v-b"]


def test_a_pinned_adapter_keeps_slot_and_host_place() -> None:
    harness = AdapterHarness(max_loras=2, max_cpu_loras=3)
    harness.places.pin(version_of("pinned"))
    for key in range(1, 20):
        harness.add(adapted(key, "pinned" if key == 1 else f"a{key % 6}"))
        harness.tick()
    harness.run()
    assert harness.loads.count("v-pinned") == 1 and harness.places.tier("v-pinned") is Tier.DEVICE
    harness.places.unpin("v-pinned")
    for key, name in ((30, "a1"), (31, "a2"), (32, "a3")):
        harness.add(adapted(key, name))
        harness.run()
    assert harness.places.tier("v-pinned") is not Tier.DEVICE


def test_forgetting_frees_both_places_unless_somebody_uses_it() -> None:
    harness = AdapterHarness()
    harness.add(adapted(1, "a", max_tokens=10))
    harness.tick()
    harness.places.forget("v-a")
    assert harness.places.tier("v-a") is Tier.DEVICE
    harness.run()
    harness.places.forget("v-a")
    harness.take_orders()
    assert harness.places.tier("v-a") is Tier.DISK and not harness.staged
    harness.add(adapted(2, "a"))
    harness.run()
    assert harness.tokens(2) == expected(adapted(2, "a")) and harness.loads == ["v-a", "v-a"]


def test_the_old_version_goes_on_while_new_requests_get_the_new_one() -> None:
    harness = AdapterHarness(max_loras=2)
    old = adapted(1, "a", max_tokens=20)
    assert old.adapter is not None
    new = dataclasses.replace(adapted(2, "a"), adapter=dataclasses.replace(old.adapter, version="v-other"))
    harness.add(old)
    harness.tick()
    harness.add(new)
    harness.run()
    assert harness.tokens(1) == expected(old) and harness.tokens(2) == expected(new)
    assert expected(dataclasses.replace(new, adapter=old.adapter)) != expected(new)


def test_adapters_survive_a_restart_of_the_shards() -> None:
    """Rows are gone; what one shard no longer holds is loaded again before a row of it opens."""
    harness = AdapterHarness(max_loras=2, max_cpu_loras=4)
    requests = [adapted(key, name, max_tokens=12) for key, name in enumerate(["a", "b", "c", None], 1)]
    for request in requests:
        harness.add(request)
    for _ in range(4):
        harness.tick()
    scheduler = harness.scheduler
    while harness.answer():
        pass
    for sequence in list(scheduler._places.running):
        scheduler._preempt(sequence)
    harness.shards.bound.clear()
    harness.shards.staged = {"v-b"}
    harness.is_auto = False
    harness.places.restart(frozenset({"v-b"}))
    harness.take_orders()
    assert sorted(harness.loading) == ["v-a", "v-c"]
    for _ in range(20):
        harness.tick()
    assert harness.tokens(2) == expected(requests[1]) and harness.tokens(4) == expected(requests[3])
    for version in list(harness.loading):
        harness.end_load(version)
    harness.run()
    for request in requests:
        assert harness.tokens(request.key) == expected(request)


def test_two_hundred_adapters_share_eight_slots() -> None:
    """Requests by a Zipf law; all right, nothing left behind."""
    chance = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(200)]
    names = [f"a{n}" for n in chance.choices(range(200), weights, k=600)]
    harness = AdapterHarness(max_loras=8, max_cpu_loras=32, info=dataclasses.replace(INFO, num_blocks=129))
    requests = [adapted(key, name, max_tokens=chance.randint(1, 12)) for key, name in enumerate(names, 1)]
    for request in requests:
        harness.add(request)
        if chance.random() < 0.8:
            harness.tick()
    harness.run(20_000)
    for request in requests:
        assert harness.tokens(request.key) == expected(request)
    assert harness.scheduler._adapters.load.running == harness.scheduler._adapters.load.waiting == ()


def test_a_host_copy_stays_while_a_step_that_binds_it_is_under_way() -> None:
    harness = AdapterHarness()
    harness.add(adapted(1, "a"))
    assert harness.send()
    harness.collect(harness.scheduler.cancel(1))
    harness.places.forget("v-a")
    harness.take_orders()
    assert harness.staged == {"v-a"}
    harness.run()
    harness.places.forget("v-a")
    harness.take_orders()
    assert harness.staged == set()
