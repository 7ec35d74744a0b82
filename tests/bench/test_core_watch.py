"""Whose processor time the rounds saw."""

import pytest

from bench.core_watch import CoreWatch, busy_s
from bench.measurement import Engine
from bench.workloads import Workload


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, workload: Workload) -> list[list[int]]:
        raise AssertionError("only its name is asked")


def test_busy_time_leaves_idle_waiting_and_guest_columns_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    # user nice system idle iowait irq softirq steal guest guest_nice
    assert busy_s("cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 1\n") == (100 + 20 + 30 + 6 + 7 + 8) / 100


def test_time_is_parted_between_the_idle_server_and_strangers() -> None:
    server, own, everything = iter([1.0, 5.0, 5.1]), iter([2.0, 2.5, 12.5]), iter([10.0, 15.5, 26.6])
    ours: Engine = Named("Cohort")
    theirs: Engine = Named("transformers")
    watch = CoreWatch(lambda: next(server), "Cohort", lambda: next(own), lambda: next(everything))
    # 2 s of ours: the server 4.0, the client 0.5, all 5.5. Then 5 s of theirs: the server 0.1, they 10.0, all 11.1.
    watch.after(ours, 2.0)
    watch.after(theirs, 5.0)
    assert watch.idle_server_cores == pytest.approx(0.1 / 5)
    assert watch.other_cores == pytest.approx((1.0 + 1.0) / 7)
