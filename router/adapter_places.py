"""Where adapters are, seen from the engine: in host memory, in a device slot, asked for; and who waits for them."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable

from router.adapter_host import AdapterHost, Order
from router.adapter_slots import AdapterSlots
from router.sequence import Sequence
from router.step import BindAdapter


class Tier(enum.Enum):
    """Where an adapter's weights are, the fastest place of all."""

    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Names of adapters that sequences run with, and of those that only waiting ones ask for."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class AdapterPlaces:
    """The scheduler's side: `add`, `place`, `enter`, `leave`, `remove` a sequence; `wake` those that waited.

    The loading side: `take_orders`, answered by `loaded`, `failed` and `dropped`. `on_change` is called when there may
    be orders to take; it must not call back. Sequences of the base model pass through everything at no cost.
    """

    def __init__(self, max_loras: int = 0, max_cpu_loras: int = 0, on_change: Callable[[], None] | None = None) -> None:
        """`max_loras` device slots, `max_cpu_loras` places in host memory."""
        self.max_loras = max_loras
        self._slots = AdapterSlots(max_loras)
        self._host = AdapterHost(max_cpu_loras, self._slots.has_slot, self._slots.is_settling)
        self._forgotten: list[Order] = []
        self._num_sequences: collections.Counter[str] = collections.Counter()  # unfinished ones, by adapter's name
        self._num_running: collections.Counter[str] = collections.Counter()
        self.on_change = on_change or (lambda: None)

    # For the scheduler.

    @property
    def num_parked(self) -> int:
        """Sequences that wait for an adapter's load or slot."""
        return self._slots.num_parked

    @property
    def load(self) -> AdapterLoad:
        """Which adapters are in use."""
        if not self._num_sequences:
            return AdapterLoad()
        waiting = sorted(self._num_sequences.keys() - self._num_running.keys())
        return AdapterLoad(tuple(sorted(self._num_running)), tuple(waiting))

    def add(self, sequence: Sequence) -> None:
        """A sequence comes; its adapter is loaded while it waits."""
        if (adapter := sequence.group.submission.adapter) is not None:
            self._num_sequences[adapter.name] += 1
            self._host.retain(adapter.version)
            self.on_change()

    def remove(self, sequence: Sequence) -> None:
        """It has ended, and does not run."""
        if (adapter := sequence.group.submission.adapter) is not None:
            self._slots.remove(sequence)
            _count_down(self._num_sequences, adapter.name)
            self._host.release(adapter.version)
            self.on_change()

    def place(self, sequence: Sequence) -> bool:
        """Whether the sequence may start now. Otherwise it is parked, and `wake` will give it back."""
        if sequence.group.submission.adapter is None:
            return True
        is_placed = self._slots.place(sequence, self._host.is_ready, self._host.is_pinned)
        self._reload()
        return is_placed

    def enter(self, sequence: Sequence) -> None:
        """A placed sequence starts to run."""
        if (adapter := sequence.group.submission.adapter) is not None:
            self._slots.enter(sequence)
            self._num_running[adapter.name] += 1

    def leave(self, sequence: Sequence) -> None:
        """A running sequence ends, or has to wait again."""
        if (adapter := sequence.group.submission.adapter) is not None:
            self._slots.leave(sequence)
            _count_down(self._num_running, adapter.name)

    def wake(self) -> list[Sequence]:
        """Sequences that were parked and may be placed again; call it before placing others."""
        woken = self._slots.wake(self._host.is_ready, self._host.is_pinned)
        self._reload()
        return woken

    def _reload(self) -> None:
        """What lost its slot and is still used may have left host memory while it had it."""
        if unbound := self._slots.take_unbound():
            for version in unbound:
                self._host.reconsider(version)
            self.on_change()

    def take_bindings(self, step_id: int) -> list[BindAdapter]:
        """What the step has to bind."""
        return self._slots.take_bindings(step_id)

    def answered(self, step_id: int) -> None:
        """The shards have run all steps up to this one."""
        if self._slots.answered(step_id):
            self.on_change()

    # For the loading side.

    def take_orders(self) -> list[Order]:
        """What the shards should load and drop; each order has to be answered."""
        orders, self._forgotten = self._forgotten, []
        return orders + self._host.take_orders()

    def loaded(self, version: str) -> None:
        """Every shard has staged it."""
        self._host.loaded(version)
        self._slots.refresh()

    def failed(self, version: str) -> None:
        """It could not be loaded, and is being dropped where it was."""
        self._host.failed(version)

    def dropped(self, version: str) -> None:
        """No shard has it any more."""
        self._host.dropped(version)
        self.on_change()

    def retain(self, version: str) -> None:
        """A call wants it loaded, as a sequence would."""
        self._host.retain(version)
        self.on_change()

    def release(self, version: str) -> None:
        """The call is over."""
        self._host.release(version)
        self.on_change()

    def pin(self, version: str) -> None:
        """It stays in host memory, and in its slot once it has one."""
        self._host.pin(version)
        self.on_change()

    def unpin(self, version: str) -> None:
        """It may be put out again."""
        self._host.unpin(version)
        self._slots.refresh()
        self.on_change()

    def forget(self, version: str) -> None:
        """Frees its places if nobody uses it."""
        if self._host.has_users(version) or self._slots.is_running(version):
            return
        self._slots.unbind(version)
        if (order := self._host.forget(version)) is not None:
            self._forgotten.append(order)
        self._slots.refresh()
        self.on_change()

    def has_users(self, version: str) -> bool:
        """Whether sequences, calls or pins need it."""
        return self._host.has_users(version)

    def is_loaded(self, version: str) -> bool:
        """Whether sequences may be bound to it, or are."""
        return self._host.is_ready(version) or self._slots.has_slot(version)

    def tier(self, version: str | None) -> Tier:
        """Where a version is."""
        if version is not None and self._slots.has_slot(version):
            return Tier.DEVICE
        return Tier.HOST if version is not None and self._host.is_ready(version) else Tier.DISK

    def restart(self, staged: frozenset[str]) -> None:
        """The link is new: no slot is bound, and `staged` is what all shards still hold. Nothing runs any more.

        What has users is asked for again, and their sequences are parked until it is there.
        """
        self._forgotten.clear()
        self._slots.restart()
        self._slots.take_unbound()
        self._host.restart(staged)
        self.on_change()

    def check_integrity(self, members: list[Sequence]) -> None:
        """Asserts that slots, places and counts add up, `members` being all unfinished sequences."""
        members = [member for member in members if member.adapter_version is not None]
        running = [member for member in members if member.slot is not None]
        self._slots.check_integrity(running, [member for member in members if member.is_parked])
        self._host.check_integrity()
        names = [member.group.submission.adapter for member in members]
        assert self._num_sequences.total() == len(names), "the number of sequences with an adapter is wrong"
        assert self._num_running.total() == len(running), "the number of running sequences with an adapter is wrong"


def _count_down(counts: collections.Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
