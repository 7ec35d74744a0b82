"""Folders that look like adapters to the router, which reads no weights."""

from __future__ import annotations

import hashlib
from pathlib import Path


def make_adapter(folder: Path, content: str = "weights") -> Path:
    """A folder with the two files that are read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def version_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()
