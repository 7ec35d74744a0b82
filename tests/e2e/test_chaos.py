"""Callers of every kind while shards are killed: see bench.chaos."""

from __future__ import annotations

import pytest

from bench.chaos import run
from tests.e2e.serving import ROOT

CLIENTS, SECONDS, MIN_KILLS = 64, 60.0, 5
MORE_MEMORY_MIB = 64.0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_request_has_its_one_right_end_while_shards_are_killed() -> None:
    outcome = await run(ROOT / "demo/cohere", CLIENTS, SECONDS, MIN_KILLS, seed=1)
    assert not outcome.faults, outcome.table()
    assert len(outcome.recoveries_s) >= MIN_KILLS
    assert len({caller for caller, _ in outcome.ends}) == 5, outcome.table()
    start, end = outcome.held
    for what in ("sequences", "kv_cache_usage", "open_calls"):
        assert end[what] == start[what] == 0, outcome.table()
    assert end["open_files"] <= start["open_files"] + 4, outcome.table()
    assert end["memory_mib"] <= start["memory_mib"] + MORE_MEMORY_MIB, outcome.table()
