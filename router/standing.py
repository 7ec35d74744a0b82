"""Where each sequence stands: it waits, is parked for its adapter, is a suspect, runs, or has ended."""

from __future__ import annotations

from collections.abc import Collection

from router.adapter_places import AdapterPlaces
from router.messages import Load
from router.places import Places
from router.quarantine import Quarantine
from router.sequence import Sequence
from router.step import ShardInfo
from router.waiting import WaitingQueue


class Standing:
    """The places of running sequences, the queue, and what stands beside it. Every move of a sequence happens here."""

    def __init__(self, info: ShardInfo, enable_prefix_caching: bool, adapters: AdapterPlaces | None) -> None:
        """`adapters` None: LoRA is off."""
        self.places = Places(info, enable_prefix_caching)
        self.adapters = adapters or AdapterPlaces()
        self.waiting = WaitingQueue()
        self.quarantine = Quarantine()

    def load(self) -> Load:
        """How busy we are."""
        num_waiting = len(self.waiting) + self.adapters.num_parked + self.quarantine.num_waiting
        return Load(len(self.places.running), num_waiting, self.places.usage)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self.adapters.add(sequence)
        self.waiting.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence gives up its place and waits, to be computed again."""
        self._give_up(sequence)
        sequence.rewind()
        self.waiting.push(sequence)

    def suspect(self, sequence: Sequence) -> None:
        """A running sequence gives up its place, to be computed again apart from the others."""
        self._give_up(sequence)
        sequence.rewind()
        self.quarantine.enter(sequence)

    def release(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it stands. May be called again."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if sequence.slot is not None:
            self._give_up(sequence)
        elif not (sequence.is_parked or sequence.is_suspect):
            self.waiting.leave()
        if sequence.is_suspect:
            self.quarantine.leave(sequence)
        self.adapters.remove(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        self.places.give_up(sequence)
        self.adapters.leave(sequence)

    def end_epoch(self, under_way: Collection[Sequence]) -> None:
        """The shards have lost everything: who ran waits again, those of them in steps `under_way` as suspects."""
        running = self.places.running
        for sequence in running:
            self.adapters.leave(sequence)
        self.adapters.end_epoch()
        self.places.reset()
        for sequence in running:
            sequence.rewind()
            if sequence in under_way and not sequence.is_suspect:
                self.quarantine.enter(sequence)
            elif not sequence.is_suspect:
                self.waiting.push(sequence)

    def check_integrity(self, members: list[Sequence]) -> None:
        """Asserts that each of `members`, all sequences there are, stands in one place, and that all counts add up."""
        self.places.check_integrity(members)
        self.adapters.check_integrity([member for member in members if not member.is_finished])
        self.quarantine.check_integrity(members)
        elsewhere = ("is_finished", "is_suspect", "is_parked")
        waiting = [m for m in members if m.slot is None and not any(getattr(m, mark) for mark in elsewhere)]
        self.waiting.check_integrity(waiting)
        assert all(member.slot is None for member in members if member.is_finished), "a finished sequence has a slot"
