"""The shards' adapter slots: which version each is bound to, and which sequences wait for one."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable

from router.sequence import Sequence
from router.step import BindAdapter

SequenceOrder = tuple[int, float, int, int]
Rule = Callable[[str], bool]  # of a version


class AdapterSlots:
    """At most `max_loras` versions run at once. A sequence whose version has no slot is parked.

    A sequence holds the slot in its `adapter_slot` from the moment that it may start. A slot that nobody holds goes to
    the version of the earliest parked sequence. Where there is none, a slot is given up: the one with the fewest
    running sequences takes no more that are later than the one that waits for it, so it empties, and nobody waits for
    ever behind a version that many ask for.
    """

    def __init__(self, max_loras: int) -> None:
        self._versions: list[str | None] = [None] * max_loras
        self._slots: dict[str, int] = {}  # by version
        self._num_running = [0] * max_loras
        self._last_used = [0] * max_loras
        self._clock = 0
        # Heaps, by slot, of sequences that may start but have not; entries of others are dropped later.
        self._awaited: list[list[tuple[SequenceOrder, int, Sequence]]] = [[] for _ in range(max_loras)]
        self._parked: dict[str, list[tuple[SequenceOrder, Sequence]]] = {}  # heaps by version
        self.num_parked = 0
        self._limits: dict[int, SequenceOrder] = {}  # slots that are given up: only earlier sequences may start there
        self._is_stale = False
        self._unbound: list[str] = []
        self._bindings: dict[int, str] = {}  # by slot, for the next step
        self._sent: collections.deque[tuple[int, list[str]]] = collections.deque()  # by step, until it is answered

    def has_slot(self, version: str) -> bool:
        """Whether a slot is bound to it, or will be in the next step."""
        return version in self._slots

    def is_settling(self, version: str) -> bool:
        """Whether a binding of it has not been sent, or its step not been answered."""
        return version in self._bindings.values() or any(version in versions for _, versions in self._sent)

    @property
    def num_bound(self) -> int:
        """Slots that have a version."""
        return len(self._slots)

    # Sequences.

    def place(self, sequence: Sequence, is_ready: Rule, is_pinned: Rule) -> bool:
        """Whether the sequence may start now, in its `adapter_slot`. Otherwise it is parked."""
        version = sequence.adapter_version
        assert version is not None
        slot = self._slots.get(version)
        if slot is None and is_ready(version):
            slot = self._free_slot(sequence.order, is_pinned)
            if slot is not None:
                self._bind(slot, version)
        if slot is None or not self._is_open(slot, sequence.order):
            self._park(sequence, version)
            return False
        if sequence.adapter_slot < 0:
            self._await(slot, sequence)
        return True

    def enter(self, sequence: Sequence) -> None:
        """A placed sequence starts to run."""
        slot = sequence.adapter_slot
        self._num_running[slot] += 1
        self._touch(slot)
        self._first_awaited(slot)  # Drops its entry.

    def leave(self, sequence: Sequence) -> None:
        """It runs no more. Its slot may be bound anew at once: the shards run steps in order."""
        self._num_running[sequence.adapter_slot] -= 1
        self._touch(sequence.adapter_slot)
        sequence.adapter_slot = -1
        self._is_stale = True

    def remove(self, sequence: Sequence) -> None:
        """A sequence that does not run has ended."""
        sequence.adapter_slot = -1
        if sequence.is_parked:
            sequence.is_parked = False
            self.num_parked -= 1
        self._is_stale = True

    def _is_open(self, slot: int, order: SequenceOrder) -> bool:
        limit = self._limits.get(slot)
        return limit is None or order < limit

    def _await(self, slot: int, sequence: Sequence) -> None:
        self._clock += 1
        heapq.heappush(self._awaited[slot], (sequence.order, self._clock, sequence))
        sequence.adapter_slot = slot

    def _park(self, sequence: Sequence, version: str) -> None:
        heapq.heappush(self._parked.setdefault(version, []), (sequence.order, sequence))
        sequence.adapter_slot = -1
        sequence.is_parked = True
        self.num_parked += 1
        self._is_stale = True

    # Who gets which slot.

    def refresh(self) -> None:
        """Something that `wake` depends on has changed."""
        self._is_stale = True

    def wake(self, is_ready: Rule, is_pinned: Rule) -> list[Sequence]:
        """Gives slots to the versions of parked sequences; those sequences that may start now, if there is room."""
        if not self._is_stale:
            return []
        self._is_stale = False
        self._limits.clear()
        self._drop_ended()
        waiting = [
            (heap[0][0], version)
            for version, heap in self._parked.items()
            if version not in self._slots and is_ready(version)
        ]
        for order, version in heapq.nsmallest(len(self._versions), waiting):
            slot = self._free_slot(order, is_pinned)
            if slot is not None:
                self._bind(slot, version)
            elif (slot := self._busy_slot(is_pinned)) is not None:
                self._limits[slot] = order
        return self._take_startable()

    def _take_startable(self) -> list[Sequence]:
        woken: list[Sequence] = []
        for version in [version for version in self._parked if version in self._slots]:
            heap, slot = self._parked[version], self._slots[version]
            while heap and self._is_open(slot, heap[0][0]):
                sequence = heapq.heappop(heap)[1]
                if sequence.is_parked:
                    sequence.is_parked = False
                    self.num_parked -= 1
                    self._await(slot, sequence)
                    woken.append(sequence)
            if not heap:
                del self._parked[version]
        return woken

    def _drop_ended(self) -> None:
        for version, heap in list(self._parked.items()):
            while heap and not heap[0][1].is_parked:
                heapq.heappop(heap)
            if not heap:
                del self._parked[version]

    def _free_slot(self, order: SequenceOrder, is_pinned: Rule) -> int | None:
        """A slot for a sequence of this order: an empty one, or the least recently used that no earlier one holds."""
        free = [
            (version is not None, first is not None, self._last_used[slot], slot)
            for slot, version in enumerate(self._versions)
            if not self._num_running[slot]
            and not (version is not None and is_pinned(version))
            and ((first := self._first_awaited(slot)) is None or order < first)
        ]
        return min(free)[-1] if free else None

    def _busy_slot(self, is_pinned: Rule) -> int | None:
        """The slot to give up: of those that are not given up already, the one that will soonest be empty."""
        busy = [
            (self._num_running[slot], self._last_used[slot], slot)
            for slot, version in enumerate(self._versions)
            if slot not in self._limits and version is not None and not is_pinned(version)
        ]
        return min(busy)[-1] if busy else None

    def _first_awaited(self, slot: int) -> SequenceOrder | None:
        heap = self._awaited[slot]
        while heap and not _is_awaited(heap[0][2], slot):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    # Bindings.

    def _bind(self, slot: int, version: str) -> None:
        self.unbind(self._versions[slot])
        self._versions[slot], self._slots[version] = version, slot
        self._bindings[slot] = version
        self._touch(slot)

    def unbind(self, version: str | None) -> None:
        """Empties the version's slot, in which nothing runs; those that may have started there are placed again."""
        if version is None or (slot := self._slots.pop(version, None)) is None:
            return
        assert not self._num_running[slot], "a slot in use is bound anew"
        for _, _, sequence in self._awaited[slot]:
            if _is_awaited(sequence, slot):
                sequence.adapter_slot = -1
        self._awaited[slot].clear()
        self._versions[slot] = None
        self._bindings.pop(slot, None)
        self._unbound.append(version)

    def take_unbound(self) -> list[str]:
        """Versions that lost their slot since the last call."""
        unbound, self._unbound = self._unbound, []
        return unbound

    def is_running(self, version: str) -> bool:
        """Whether a sequence runs with it."""
        return version in self._slots and self._num_running[self._slots[version]] > 0

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock

    def take_bindings(self, step_id: int) -> list[BindAdapter]:
        """What the step has to bind."""
        if not self._bindings:
            return []
        bindings, self._bindings = self._bindings, {}
        self._sent.append((step_id, list(bindings.values())))
        return [BindAdapter(slot, version) for slot, version in bindings.items()]

    def answered(self, step_id: int) -> bool:
        """The shards have run all steps up to this one; whether a binding was among them."""
        is_settled = False
        while self._sent and self._sent[0][0] <= step_id:
            self._sent.popleft()
            is_settled = True
        return is_settled

    def restart(self) -> None:
        """Empties every slot; nothing runs any more. Parked sequences stay."""
        assert not any(self._num_running), "a sequence still runs"
        for version in list(self._slots):
            self.unbind(version)
        self._sent.clear()
        self._limits.clear()
        self._is_stale = True

    def check_integrity(self, running: list[Sequence], parked: list[Sequence]) -> None:
        """Asserts that slots and counts add up; every running and parked sequence with an adapter is given."""
        counts = collections.Counter(sequence.adapter_slot for sequence in running)
        assert [counts[slot] for slot in range(len(self._versions))] == self._num_running, "a slot's count is wrong"
        for sequence in running:
            assert self._versions[sequence.adapter_slot] == sequence.adapter_version, "a sequence in another's slot"
        bound = {version: slot for slot, version in enumerate(self._versions) if version is not None}
        assert bound == self._slots, "a version has two slots, or a slot two versions"
        here = [entry[1] for heap in self._parked.values() for entry in heap if entry[1].is_parked]
        assert sorted(map(id, here)) == sorted(map(id, parked)), "a parked sequence is lost or parked twice"
        assert len(here) == self.num_parked, "the number of parked sequences is wrong"


def _is_awaited(sequence: Sequence, slot: int) -> bool:
    return sequence.adapter_slot == slot and sequence.slot is None
