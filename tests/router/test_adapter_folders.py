"""What callers may load, what they may not, and private copies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.adapter_folders import AdapterFolders
from router.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.router.adapter_files import make_adapter, version_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "adapters"
    make_adapter(root / "a")
    make_adapter(root / "team" / "b")
    make_adapter(tmp_path / "secret")
    return root


@pytest.fixture
def folders(root: Path) -> Iterator[AdapterFolders]:
    folders = AdapterFolders([root.resolve()])
    yield folders
    folders.close()


def test_folders_inside_are_found_by_absolute_and_relative_path_and_by_name(
    folders: AdapterFolders, root: Path
) -> None:
    for path in ("a", str(root / "a"), "team/../a", f"{root}/team/b/../../a", "./a/"):
        assert folders.resolve(path) == root / "a"
    assert folders.resolve("team/b") == root / "team" / "b"
    assert folders.find("a") == root / "a" and folders.find("team") is None
    assert folders.names() == {"a": root / "a"}


@pytest.mark.parametrize(
    "path",
    [
        *("../secret", "{tmp}/secret", "a/../../secret", "/", "/etc", "", ".", "{root}", "a/../..", "{root}/../secret"),
        *("link", "link/", "a/link", "{root}/link", "far/secret", "loop", "nul\0", "../adapters-not/x"),
        "/proc/self/cwd",
    ],
)
def test_paths_that_lead_outside_are_refused_however_they_are_written(
    folders: AdapterFolders, root: Path, path: str
) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    (root / "a" / "link").symlink_to("../../secret")
    (root / "far").symlink_to("..")
    (root / "loop").symlink_to("loop")
    make_adapter(root.parent / "adapters-not" / "x")
    with pytest.raises(InvalidArgument, match="path: must be a folder inside one of the server's --adapter-dirs"):
        folders.resolve(path.format(tmp=root.parent, root=root))
    for name in (path, "link", "far"):
        assert folders.find(name) is None
    assert folders.names() == {"a": root / "a"}


def test_links_that_stay_inside_are_followed(folders: AdapterFolders, root: Path) -> None:
    (root / "alias").symlink_to("team/b")
    assert folders.resolve("alias") == folders.find("alias") == root / "team" / "b"


def test_a_folder_that_is_not_there_is_not_found(folders: AdapterFolders) -> None:
    with pytest.raises(NotFound, match="'nobody'"):
        folders.resolve("nobody")
    with pytest.raises(NotFound, match="xxx"):
        folders.resolve("x" * 5000)
    assert folders.find("nobody") is None and folders.find("x" * 5000) is None


def test_without_adapter_dirs_nothing_can_be_loaded_by_path() -> None:
    folders = AdapterFolders([])
    with pytest.raises(FailedPrecondition, match="--adapter-dirs"):
        folders.resolve("/etc")
    assert folders.find("a") is None and folders.names() == {}
    folders.close()


def test_a_copy_is_private_and_named_by_its_content(folders: AdapterFolders, root: Path) -> None:
    copy = folders.copy(root / "a")
    assert copy.version == version_of(root / "a") == folders.copy(root / "team" / "b").version
    make_adapter(root / "a", "others")
    assert version_of(copy.folder) == copy.version != folders.copy(root / "a").version
    assert copy.folder.parent.stat().st_mode & 0o077 == 0
    folders.remove(copy.folder)
    assert not copy.folder.exists()
    folders.close()
    assert not copy.folder.parent.exists()


def test_files_that_are_links_to_outside_are_refused_unless_a_flag_named_the_folder(
    folders: AdapterFolders, root: Path
) -> None:
    weights = root / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(root.parent / "secret" / "adapter_model.safetensors")
    with pytest.raises(FailedPrecondition, match=r"adapter_model.safetensors is a link to a file outside"):
        folders.copy(root / "a")
    assert folders.copy(root / "a", is_trusted=True).version == version_of(root / "team" / "b")


def test_what_cannot_be_read_is_refused_with_the_reason_and_leaves_nothing(folders: AdapterFolders, root: Path) -> None:
    weights = root / "a" / "adapter_model.safetensors"
    weights.unlink()
    with pytest.raises(FailedPrecondition, match=r"adapter_model.safetensors: No such file"):
        folders.copy(root / "a")
    (root / "a" / "adapter_model.bin").write_text("pickle")
    with pytest.raises(FailedPrecondition, match=r"adapter_model.bin is not loaded.*convert it"):
        folders.copy(root / "a")
    os.mkfifo(weights)
    with pytest.raises(FailedPrecondition, match="is no file"):
        folders.copy(root / "a")
    weights.unlink()
    weights.mkdir()
    with pytest.raises(FailedPrecondition, match=r"adapter_model\.safetensors"):
        folders.copy(root / "a")
    assert list(folders._copies.iterdir()) == []
