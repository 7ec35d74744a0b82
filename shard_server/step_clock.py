"""How long a step took and how long the device waited before it, by the device's own clock where it has one."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

import torch


class StepTiming(Protocol):
    """One step's times."""

    @property
    def event(self) -> torch.cuda.Event | None:
        """Happens when the device has ended the step; None where it has ended already."""

    def wait(self) -> tuple[float, float]:
        """Waits for the step's end; its duration and the idle time before it, in seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostTiming:
    """A step that was computed at once."""

    step_s: float
    idle_s: float
    event: None = None

    def wait(self) -> tuple[float, float]:
        """See StepTiming.wait."""
        return self.step_s, self.idle_s


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTiming:
    """Events around a step on the device, and the end of the step before."""

    previous: torch.cuda.Event | None
    start: torch.cuda.Event
    event: torch.cuda.Event

    def wait(self) -> tuple[float, float]:
        """See StepTiming.wait."""
        self.event.synchronize()
        idle_ms = self.previous.elapsed_time(self.start) if self.previous is not None else 0.0
        return self.start.elapsed_time(self.event) / 1e3, max(idle_ms, 0.0) / 1e3


class StepClock:
    """Made for a device; `begin` and `end` go around what a step gives it to do, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self.reset()

    def reset(self) -> None:
        """No step came before the next one."""
        self._previous_s: float | None = None
        self._previous: torch.cuda.Event | None = None

    def begin(self) -> None:
        """The step starts here."""
        if self._is_cpu:
            self._start_s = time.perf_counter()
        else:
            self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._start.record()

    def end(self) -> StepTiming:
        """The step ends here."""
        if self._is_cpu:
            now_s = time.perf_counter()
            idle_s = self._start_s - self._previous_s if self._previous_s is not None else 0.0
            self._previous_s = now_s
            return HostTiming(now_s - self._start_s, idle_s)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        timing = DeviceTiming(self._previous, self._start, event)
        self._previous = event
        return timing
