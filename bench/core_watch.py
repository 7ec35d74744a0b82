"""Who used the processor during the rounds: the idle server while others ran, and processes that are none of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bench.measurement import Engine

IDLE_COLUMNS = (3, 4)  # idle and iowait, of user, nice, system, idle, iowait, irq, softirq, ...; see proc_stat(5)
NUM_COLUMNS = 8  # guest times are counted in user already


def busy_s(stat: str) -> float:
    """Processor seconds that all cores were busy since the start, from the text of /proc/stat."""
    ticks = [int(field) for field in stat.split("\n", 1)[0].split()[1 : NUM_COLUMNS + 1]]
    busy = sum(count for column, count in enumerate(ticks) if column not in IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Processor seconds of this process so far."""
    times = os.times()
    return times.user + times.system


class CoreWatch:
    """Told after each round, it adds up processor time. `server_cpu_s` reads the server's so far."""

    def __init__(
        self,
        server_cpu_s: Callable[[], float],
        server_engine: str,
        own_s: Callable[[], float] = own_cpu_s,
        all_s: Callable[[], float] = lambda: busy_s(Path("/proc/stat").read_text()),
    ) -> None:
        """`server_engine` is the name of the engine that the server's time belongs to."""
        self._read = (server_cpu_s, own_s, all_s)
        self._server_engine = server_engine
        self._before = [read() for read in self._read]
        self._idle_server_s = self._idle_wall_s = self._others_s = self._wall_s = 0.0

    def after(self, engine: Engine, seconds: float) -> None:
        """Takes in a round of `engine` that lasted `seconds`."""
        now = [read() for read in self._read]
        server_s, own_s, all_s = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        if engine.name != self._server_engine:
            self._idle_server_s += server_s
            self._idle_wall_s += seconds
        self._others_s += all_s - own_s - server_s
        self._wall_s += seconds

    @property
    def idle_server_cores(self) -> float:
        """Cores that the server kept busy while the other engines ran."""
        return self._idle_server_s / self._idle_wall_s if self._idle_wall_s else 0.0

    @property
    def other_cores(self) -> float:
        """Cores that processes of others kept busy; well above 0, the figures are not worth much."""
        return max(0.0, self._others_s / self._wall_s) if self._wall_s else 0.0
