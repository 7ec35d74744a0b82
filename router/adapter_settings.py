"""What the flags say about adapters, checked before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from router.config import RouterConfig
from router.errors import StartupError

HOST_PLACES_PER_SLOT = 4  # unless --max-cpu-loras says how many


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSettings:
    """`modules` are name and folder of what is loaded at the start, `dirs` the folders that callers may load from."""

    is_enabled: bool = False
    max_loras: int = 0
    max_cpu_loras: int = 0
    modules: tuple[tuple[str, Path], ...] = ()
    dirs: tuple[Path, ...] = ()

    @classmethod
    def from_config(cls, config: RouterConfig) -> AdapterSettings:
        """Raises StartupError for flags that contradict each other and folders that are not there."""
        if not config.enable_lora:
            for flag, value in (("--lora-modules", config.lora_modules), ("--adapter-dirs", config.adapter_dirs)):
                if value:
                    raise StartupError(f"{flag} needs --enable-lora")
            return cls()
        max_cpu_loras = config.max_cpu_loras or HOST_PLACES_PER_SLOT * config.max_loras
        if max_cpu_loras < config.max_loras:
            raise StartupError(
                f"--max-cpu-loras {max_cpu_loras} is below --max-loras {config.max_loras}; host memory has to hold "
                "what the device slots hold"
            )
        modules = tuple(_module(text) for text in config.lora_modules)
        names = [name for name, _ in modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise StartupError(f"--lora-modules names {twice!r} twice")
        dirs = tuple(_folder(text, "--adapter-dirs") for text in config.adapter_dirs)
        return cls(True, config.max_loras, max_cpu_loras, modules, dirs)


def _module(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise StartupError(f"--lora-modules wants name=path, not {text!r}")
    return name, _folder(path, f"--lora-modules {name}")


def _folder(text: str, flag: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise StartupError(f"{flag}: {text} is no folder")
    return path.resolve()
