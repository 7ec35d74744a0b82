"""One record, one line, whatever is in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from router import logs


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield logging.getLogger("router.test")
    root.handlers[:], root.level = handlers, level


def test_text_has_values_as_pairs_and_quotes_what_could_mislead(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", "text")
    logs.event(logger, "request ended", request_id='a\nb code="OK"', num=3, seconds=0.25, empty="")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(r'request ended request_id="a\nb code=\"OK\"" num=3 seconds=0.25 empty=""')
    assert "INFO router.test:" in line


def test_json_is_one_object_per_line(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    logs.event(logger, "request ended", request_id="é\n", num=3)
    try:
        raise ValueError("lost")
    except ValueError:
        logger.exception("failed\nbadly")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["request_id"], first["num"], first["level"]) == ("request ended", "é\n", 3, "INFO")
    assert second["message"] == "failed\nbadly" and "ValueError: lost" in second["error"]


def test_a_level_hides_what_is_below_it(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "text")
    logs.event(logger, "unseen")
    logger.warning("seen")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("seen")
