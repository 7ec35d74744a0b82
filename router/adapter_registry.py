"""Names of adapters, the versions that they stand for, and who needs which version's copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from router.adapter_folders import AdapterCopy
from router.adapter_link import AdapterRecipe, AdapterSource
from router.errors import FailedPrecondition
from router.messages import AdapterRef


@dataclasses.dataclass(slots=True)
class KnownAdapter:
    """A name and where it comes from.

    What a call or a flag loaded keeps its version until it is loaded or unloaded again. A name that a request found on
    disk has a version only while that is in use or in the shards' memory.
    """

    name: str
    folder: Path
    is_trusted: bool = False
    is_kept: bool = False
    is_pinned: bool = False
    is_leaving: bool = False
    version: str | None = None
    num_requests: int = 0  # of any version


@dataclasses.dataclass(slots=True)
class AdapterVersion:
    """One content and the copy that shards read. It lives as long as somebody holds it."""

    version: str
    folder: Path
    num_holds: int = 0
    rank: int = 0  # known once a shard has read it


class AdapterRegistry:
    """`remove_copy` is called with the copy of a version that nobody holds any more."""

    def __init__(self, remove_copy: Callable[[Path], None]) -> None:
        self._remove_copy = remove_copy
        self._names: dict[str, KnownAdapter] = {}
        self._versions: dict[str, AdapterVersion] = {}

    def __iter__(self) -> Iterator[KnownAdapter]:
        return iter(self._names.values())

    def get(self, name: str) -> KnownAdapter | None:
        """What the name stands for."""
        return self._names.get(name)

    def version(self, version: str) -> AdapterVersion:
        """A version that somebody holds."""
        return self._versions[version]

    def add(self, copy: AdapterCopy) -> str:
        """The copy's version, held once for the caller. A second copy of a version is removed."""
        if copy.version in self._versions:
            self._remove_copy(copy.folder)
        else:
            self._versions[copy.version] = AdapterVersion(copy.version, copy.folder)
        self.hold(copy.version)
        return copy.version

    def recipe(self, version: str) -> AdapterRecipe:
        """How shards get the version."""
        held = self._versions[version]
        return AdapterRecipe(version, (AdapterSource(str(held.folder), version),))

    def hold(self, version: str) -> None:
        """One more needs the version."""
        self._versions[version].num_holds += 1

    def release(self, version: str) -> None:
        """One less. After the last, names that stand for it have to be read from disk again."""
        held = self._versions[version]
        held.num_holds -= 1
        if held.num_holds == 0:
            del self._versions[version]
            for adapter in self._names.values():
                if adapter.version == version:
                    adapter.version = None
            self._remove_copy(held.folder)

    def assign(self, new: KnownAdapter) -> None:
        """From now on `new.name` stands for `new.version`, which the caller holds; running requests keep theirs."""
        assert new.version is not None
        old = self._names.get(new.name)
        if new.is_kept:
            self.hold(new.version)
        if old is not None:
            new.num_requests = old.num_requests
            self._let_go(old)
        self._names[new.name] = new

    def remove(self, name: str) -> None:
        """Forgets a name without requests."""
        adapter = self._names.pop(name)
        assert not adapter.num_requests, "an adapter in use is forgotten"
        self._let_go(adapter)

    def _let_go(self, adapter: KnownAdapter) -> None:
        if adapter.is_kept and adapter.version is not None:
            adapter.is_kept = False
            self.release(adapter.version)

    def stands_for(self, version: str) -> bool:
        """Whether a name does."""
        return any(adapter.version == version for adapter in self._names.values())

    def begin(self, name: str) -> AdapterRef | None:
        """A request begins to use the name's version; None if that has to be read from disk first.

        Raises FailedPrecondition while the adapter is being unloaded.
        """
        adapter = self._names.get(name)
        if adapter is not None and adapter.is_leaving:
            raise FailedPrecondition(f"adapter {name!r} is being unloaded")
        if adapter is None or adapter.version is None:
            return None
        adapter.num_requests += 1
        self.hold(adapter.version)
        return AdapterRef(name, adapter.version)

    def end(self, ref: AdapterRef) -> KnownAdapter:
        """The request is over."""
        adapter = self._names[ref.name]
        adapter.num_requests -= 1
        self.release(ref.version)
        return adapter

    def check_integrity(self) -> None:
        """Asserts what always holds."""
        for adapter in self._names.values():
            assert adapter.num_requests >= 0, "more requests ended than began"
            assert adapter.version is None or adapter.version in self._versions, "a name stands for what is gone"
            assert not adapter.is_kept or adapter.version is not None, "a version that is kept is gone"
        assert all(held.num_holds > 0 for held in self._versions.values()), "a version that nobody holds is kept"
