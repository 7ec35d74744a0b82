"""Keeps results: a Markdown page for people and a JSON file for programs, side by side in bench/results/."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up in plain text too; the first is flush left, the others right."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    rule = ["-" * widths[0], *["-" * (width - 1) + ":" for width in widths[1:]]]
    return "".join(_line(row, widths) for row in [cells[0], rule, *cells[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    return " | ".join([f"| {first.lstrip():<{widths[0]}}", *others]) + " |\n"


def facts_line(facts: dict[str, object]) -> str:
    """Machine facts as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in facts.items()) or "not measured"


def figure(value: float) -> str:
    """A rate with three digits that matter, thousands parted."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ratio(value: float, other: float) -> str:
    """How many times `other` a value is."""
    return f"{value / other:.2f}" if other else "-"


def save(name: str, page: str, data: dict[str, object], folder: Path = RESULTS) -> Path:
    """Writes `name`.md and `name`.json into `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stamped = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **data}
    (folder / f"{name}.json").write_text(json.dumps(stamped, indent=2) + "\n")
    path = folder / f"{name}.md"
    path.write_text(page)
    return path
