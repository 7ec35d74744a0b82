"""The reference pages name everything that the code has."""

import dataclasses
import re
from pathlib import Path

from router.config import RouterConfig
from router.errors import RequestError
from router.metrics import Metrics
from router.status import CODES

ROOT = Path(__file__).resolve().parent.parent


def test_every_flag_stands_in_its_page_with_its_default() -> None:
    page = (ROOT / "docs/flags.md").read_text()
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| `([^`]*)` \|", page, re.MULTILINE))
    fields = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(RouterConfig)}
    assert rows.keys() == fields.keys()
    for name, default in fields.items():
        shown = "none" if default in ("", ()) else str(default).lower()
        assert rows[name] == shown, name


def test_every_metric_stands_in_its_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for family in Metrics("m", has_aliases=True).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in page, name


def test_every_status_stands_in_its_page() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    for code in CODES.values():
        assert f"`{code.name}`" in page


def test_every_kind_of_request_error_has_a_status() -> None:
    def kinds(error: type[RequestError]) -> set[type[RequestError]]:
        return {error}.union(*(kinds(child) for child in error.__subclasses__()))

    assert kinds(RequestError) - {RequestError} == CODES.keys()


def test_pages_link_only_to_files_that_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
