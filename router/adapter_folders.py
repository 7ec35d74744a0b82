"""Adapter folders on disk: which of them may be read, and private copies of what is in use. Blocking; run in threads.

A version of an adapter is the SHA-256 of the SHA-256s of its two files, as shards compute it too. They read the copy
and never the folder itself, so that whoever changes the folder changes no version that requests use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from router.errors import FailedPrecondition, InvalidArgument, NotFound

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
PICKLE_FILE = "adapter_model.bin"
CHUNK_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCopy:
    """A private copy of an adapter's files; `version` is their hash."""

    version: str
    folder: Path


class AdapterFolders:
    """The folders that callers may load from, and this process's own one for copies, removed by `close`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """`roots` are resolved."""
        self._roots = tuple(roots)
        self._copies = Path(tempfile.mkdtemp(prefix="cohort-adapters-"))
        self._numbers = itertools.count(1)

    def resolve(self, path: str) -> Path:
        """The adapter folder that a caller means; a relative path is looked for in each root.

        Raises InvalidArgument for a path that leads outside, symlinks followed, and NotFound where no folder is.
        """
        if not self._roots:
            raise FailedPrecondition("adapters cannot be loaded by path: the server has no --adapter-dirs")
        inside = [found for root in self._roots if (found := self._inside(root, path)) is not None]
        if not inside:
            raise InvalidArgument("path", "must be a folder inside one of the server's --adapter-dirs")
        for folder in inside:
            if os.path.isdir(folder):  # False for a name too long, too.
                return folder
        raise NotFound(f"there is no adapter folder {path[:256]!r}")

    def find(self, name: str) -> Path | None:
        """The folder of this name in a root, if it holds an adapter."""
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            return None
        for root in self._roots:
            folder = self._inside(root, name)
            if folder is not None and _is_adapter(folder):
                return folder
        return None

    def names(self) -> dict[str, Path]:
        """Every name that `find` finds."""
        entries = {entry for root in self._roots for entry in _entries(root)}
        return {name: folder for name in sorted(entries) if (folder := self.find(name)) is not None}

    def _inside(self, root: Path, path: str) -> Path | None:
        """`path` from `root`, symlinks and `..` resolved, unless it then lies outside every root."""
        try:
            resolved = (root / path).resolve()
        except (OSError, RuntimeError, ValueError):  # A name too long, a loop of links, a zero byte.
            return None
        return resolved if self._is_allowed(resolved) and resolved not in self._roots else None

    def _is_allowed(self, resolved: Path) -> bool:
        return any(resolved.is_relative_to(root) for root in self._roots)

    def copy(self, folder: Path, is_trusted: bool = False) -> AdapterCopy:
        """Copies and hashes an adapter. In a trusted folder, one that a flag names, links may lead anywhere.

        Raises FailedPrecondition with the reason if the folder is no adapter that can be read.
        """
        if not (folder / WEIGHTS_FILE).exists() and (folder / PICKLE_FILE).exists():
            raise FailedPrecondition(
                f"{PICKLE_FILE} is not loaded, since a pickle may run code; convert it to {WEIGHTS_FILE} "
                "by loading and saving it with PEFT (safe_serialization=True)"
            )
        target = self._copies / str(next(self._numbers))
        target.mkdir()
        digest = hashlib.sha256()
        try:
            for name in FILES:
                digest.update(self._copy_file(folder / name, target / name, is_trusted))
        except OSError as error:
            self.remove(target)
            raise FailedPrecondition(f"the adapter cannot be read: {name}: {error.strerror}") from error
        except BaseException:
            self.remove(target)
            raise
        return AdapterCopy(digest.hexdigest(), target)

    def _copy_file(self, source: Path, target: Path, is_trusted: bool) -> bytes:
        """Copies a file; its SHA-256."""
        resolved = source.resolve(strict=True)
        if not is_trusted and not self._is_allowed(resolved):
            raise FailedPrecondition(f"{source.name} is a link to a file outside the server's --adapter-dirs")
        # Neither a link put there since, nor a pipe that would keep us waiting.
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        digest = hashlib.sha256()
        with open(descriptor, "rb") as reader, target.open("xb") as writer:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FailedPrecondition(f"{source.name} is no file")
            while chunk := reader.read(CHUNK_BYTES):
                digest.update(chunk)
                writer.write(chunk)
        return digest.digest()

    def remove(self, folder: Path) -> None:
        """Removes a copy."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes all copies."""
        shutil.rmtree(self._copies, ignore_errors=True)


def _is_adapter(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).is_file()
    except OSError:
        return False


def _entries(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except OSError:
        return []
