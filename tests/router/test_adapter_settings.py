"""What the flags say about adapters, and which of them contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.adapter_settings import AdapterSettings
from router.config import load_config
from router.errors import StartupError


def settings(*argv: str) -> AdapterSettings:
    return AdapterSettings.from_config(load_config(argv, {}))


def test_without_the_switch_nothing_is_on() -> None:
    assert settings() == AdapterSettings() and not settings().is_enabled


def test_modules_dirs_and_places_are_read(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    modules = f"--lora-modules=a={tmp_path}/x, b={tmp_path}/y"
    found = settings("--enable-lora", modules, f"--adapter-dirs={tmp_path}", "--max-loras=3")
    assert found.modules == (("a", tmp_path / "x"), ("b", tmp_path / "y")) and found.dirs == (tmp_path,)
    assert (found.max_loras, found.max_cpu_loras) == (3, 12)
    assert settings("--enable-lora", "--max-loras=3", "--max-cpu-loras=5").max_cpu_loras == 5


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--lora-modules=a={tmp}"], "--lora-modules needs --enable-lora"),
        (["--adapter-dirs={tmp}"], "--adapter-dirs needs --enable-lora"),
        (["--enable-lora", "--lora-modules=a"], "wants name=path, not 'a'"),
        (["--enable-lora", "--lora-modules=={tmp}"], "wants name=path"),
        (["--enable-lora", "--lora-modules=a={tmp},a={tmp}"], "names 'a' twice"),
        (["--enable-lora", "--lora-modules=a={tmp}/none"], "none is no folder"),
        (["--enable-lora", "--adapter-dirs={tmp}/none"], "--adapter-dirs: .*none is no folder"),
        (["--enable-lora", "--max-loras=4", "--max-cpu-loras=3"], "--max-cpu-loras 3 is below --max-loras 4"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(tmp_path: Path, argv: list[str], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        settings(*(text.format(tmp=tmp_path) for text in argv))
