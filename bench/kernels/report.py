"""The measurements of one run, and what failed in it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

Row = dict[str, Any]


class Report:
    """Rows of (section, case, variant, microseconds, rate, unit, error)."""

    def __init__(self) -> None:
        """Empty."""
        self.rows: list[Row] = []

    def add(
        self, section: str, case: str, variant: str, seconds: float, amount: float, unit: str, error: float | None
    ) -> None:
        """`amount` is what was done in `seconds`: bytes for TB/s, operations for TFLOP/s, rows for row/s."""
        rate = amount / seconds / (1 if unit == "row/s" else 1e12)
        row = {"section": section, "case": case, "variant": variant, "us": seconds * 1e6, "rate": rate, "unit": unit}
        self.rows.append(row | {"error": error})
        self._say(self.rows[-1])

    def _say(self, row: Row) -> None:
        error = "" if row["error"] is None else f" error {row['error']:.1e}"
        line = "{section:8} {case:22} {variant:26} {us:10.2f} us {rate:9.3f} {unit}".format(**row)
        sys.stdout.write(line + error + "\n")
        sys.stdout.flush()

    def table(self) -> None:
        """The fastest variant of each case, and the runner-up."""
        sys.stdout.write("\nfastest of each case\n")
        cases: dict[tuple[object, object], list[Row]] = {}
        for row in self.rows:
            cases.setdefault((row["section"], row["case"]), []).append(row)
        for rows in cases.values():
            best = sorted(rows, key=lambda row: row["us"])[:2]
            self._say(best[0])
            if len(best) > 1:
                sys.stdout.write(f"{'':31} then {best[1]['variant']} {best[1]['us']:.2f} us\n")


def tried(what: str, action: Callable[[], object]) -> None:
    """Runs `action`; an exception is shown and the rest goes on."""
    try:
        action()
        torch.cuda.synchronize()
    except Exception as error:
        text = str(error).splitlines()
        sys.stdout.write(f"FAILED {what}: {type(error).__name__}: {text[0][:200] if text else ''}\n")
        traceback.print_exc(limit=-3, file=sys.stderr)
