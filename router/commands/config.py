"""`config`: prints what `serve` would run with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import yaml

from router.config import effective, load_config


def main(argv: Sequence[str]) -> int:
    """Prints the effective configuration as a YAML file that `--config` takes."""
    sys.stdout.write(yaml.safe_dump(effective(load_config(argv, os.environ, "config")), sort_keys=False))
    return 0
