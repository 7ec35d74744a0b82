"""Which adapters the shards hold in host memory, and which they should load or drop next."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable


class HostState(enum.Enum):
    """A version that takes a place in the shards' host memory."""

    LOADING = "loading"
    READY = "ready"
    DROPPING = "dropping"


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOrder:
    """Every shard should stage this version."""

    version: str


@dataclasses.dataclass(frozen=True, slots=True)
class DropOrder:
    """Every shard should drop this version."""

    version: str


Order = LoadOrder | DropOrder


class AdapterHost:
    """At most `capacity` versions, those on their way in or out included.

    A user is whoever needs the version: a sequence, a call that loads it, a pin. What has users and is neither here nor
    in a device slot is wanted, first come, first served. For a wanted version the least recently used one goes that has
    no users, or else one whose users run from a device slot already. One that somebody waits for is never put out
    before it got its slot.
    """

    def __init__(self, capacity: int, has_slot: Callable[[str], bool], is_settling: Callable[[str], bool]) -> None:
        """`has_slot` tells whether a device slot is bound to a version, `is_settling` whether a binding of it may not
        have happened yet, so that its host copy is still needed."""
        self._capacity = capacity
        self._has_slot = has_slot
        self._is_settling = is_settling
        self._states: dict[str, HostState] = {}  # in order of use, the latest last
        self._users: collections.Counter[str] = collections.Counter()
        self._pinned: set[str] = set()
        self._wanted: dict[str, None] = {}

    @property
    def versions(self) -> list[str]:
        """Everything that takes a place."""
        return list(self._states)

    def is_ready(self, version: str) -> bool:
        """Whether every shard has staged it."""
        return self._states.get(version) is HostState.READY

    def is_pinned(self, version: str) -> bool:
        """Whether it must not be put out."""
        return version in self._pinned

    def has_users(self, version: str) -> bool:
        """Whether somebody needs it."""
        return version in self._users

    def retain(self, version: str) -> None:
        """One more user; the version will be loaded if it is not there."""
        self._users[version] += 1
        self.reconsider(version)
        if version in self._states:
            self._states[version] = self._states.pop(version)

    def release(self, version: str) -> None:
        """One user less. Without users the version stays until another needs its place."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            self._wanted.pop(version, None)

    def pin(self, version: str) -> None:
        """Never put it out."""
        if version not in self._pinned:
            self._pinned.add(version)
            self.retain(version)

    def unpin(self, version: str) -> None:
        """As any other again."""
        if version in self._pinned:
            self._pinned.discard(version)
            self.release(version)

    def reconsider(self, version: str) -> None:
        """It lost its slot or its place here, or has a new user: whether it has to be loaded."""
        is_here = self._states.get(version) in (HostState.LOADING, HostState.READY)
        if version in self._users and not is_here and not self._has_slot(version):
            self._wanted[version] = None

    def take_orders(self) -> list[Order]:
        """What the shards should do now; each order is handed out once and has to be answered."""
        orders: list[Order] = []
        num_leaving = sum(state is HostState.DROPPING for state in self._states.values())
        for version in list(self._wanted):
            if version in self._states:  # It is on its way out; it comes back when it is gone.
                continue
            if len(self._states) < self._capacity:
                del self._wanted[version]
                self._states[version] = HostState.LOADING
                orders.append(LoadOrder(version))
            elif num_leaving:  # The place that becomes free is this one's.
                num_leaving -= 1
            elif (victim := self._victim()) is not None:
                self._states[victim] = HostState.DROPPING
                orders.append(DropOrder(victim))
            else:
                break
        return orders

    def _victim(self) -> str | None:
        evictable = [
            version
            for version, state in self._states.items()
            if state is HostState.READY and version not in self._pinned and not self._is_settling(version)
        ]
        unused = (version for version in evictable if version not in self._users)
        in_slots = (version for version in evictable if self._has_slot(version))
        return next(unused, None) or next(in_slots, None)

    def forget(self, version: str) -> DropOrder | None:
        """Drops a version without users at once, where that is possible."""
        is_ready = self._states.get(version) is HostState.READY
        if not is_ready or version in self._users or self._is_settling(version):
            return None
        self._states[version] = HostState.DROPPING
        return DropOrder(version)

    def loaded(self, version: str) -> None:
        """Every shard has staged it."""
        assert self._states[version] is HostState.LOADING
        self._states[version] = HostState.READY

    def failed(self, version: str) -> None:
        """It could not be loaded; shards that have it are told to drop it, so an answer to that still comes."""
        assert self._states[version] is HostState.LOADING
        self._states[version] = HostState.DROPPING
        self.unpin(version)

    def dropped(self, version: str) -> None:
        """No shard has it any more."""
        assert self._states[version] is HostState.DROPPING
        del self._states[version]
        self.reconsider(version)

    def restart(self, staged: frozenset[str]) -> None:
        """The shards are new, or have given up what was under way; `staged` is what all of them still hold."""
        kept = [version for version, state in self._states.items() if version in staged and state is HostState.READY]
        self._states = dict.fromkeys(kept[-self._capacity :], HostState.READY)
        self._wanted.clear()
        for version in self._users:
            self.reconsider(version)

    def check_integrity(self) -> None:
        """Asserts what always holds."""
        assert len(self._states) <= self._capacity, "more adapters in host memory than allowed"
        assert all(count > 0 for count in self._users.values()), "a version without users is counted"
        assert self._wanted.keys() <= self._users.keys(), "a version is wanted by nobody"
        assert self._pinned <= self._users.keys(), "a pin does not count"
        here = {version for version, state in self._states.items() if state is not HostState.DROPPING}
        assert not here & self._wanted.keys(), "a version is here and wanted"
        lost = self._users.keys() - here - self._wanted.keys()
        assert all(self._has_slot(version) for version in lost), "a version that is used will never be loaded"
