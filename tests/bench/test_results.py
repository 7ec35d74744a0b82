"""Tables and files."""

import json
from pathlib import Path

from bench.results import figure, markdown_table, ratio, save


def test_table_lines_up_and_is_markdown() -> None:
    lines = markdown_table(("name", "n"), [("long name", "1,024"), ("x", "7")]).splitlines()
    assert lines == [
        "| name      |     n |",
        "| --------- | ----: |",
        "| long name | 1,024 |",
        "| x         |     7 |",
    ]


def test_figures_are_rounded_for_reading() -> None:
    assert [figure(value) for value in (38.46, 99.94, 2513.2)] == ["38.5", "99.9", "2,513"]
    assert ratio(3, 2) == "1.50" and ratio(3, 0) == "-"


def test_page_and_data_lie_side_by_side(tmp_path: Path) -> None:
    path = save("cpu", "a page", {"a": 1}, tmp_path / "results")
    assert path.read_text() == "a page"
    data = json.loads((tmp_path / "results" / "cpu.json").read_text())
    assert data.pop("date").startswith("20") and data == {"a": 1}
