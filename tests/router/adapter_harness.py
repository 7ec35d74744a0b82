"""A scheduler with adapters, stepped by hand, whose loads end when the test says so."""

from __future__ import annotations

import collections
import dataclasses

from router.adapter_host import DropOrder, LoadOrder
from router.adapter_places import AdapterPlaces
from router.errors import FailedPrecondition
from router.messages import AdapterRef, Submission
from router.step import ShardInfo, Step
from tests.fake_shards import INFO
from tests.router.test_scheduler import Harness, submission


def version_of(name: str) -> str:
    return f"v-{name}"


def adapted(key: int, name: str | None, num_prompt: int = 5, max_tokens: int = 4, **fields: object) -> Submission:
    """A request for an adapter; None: the base model."""
    adapter = None if name is None else AdapterRef(name, version_of(name))
    return submission(key, num_prompt, max_tokens, adapter=adapter, **fields)


class AdapterHarness(Harness):
    """`is_auto`: loads end as soon as they are asked for. A step is executed when its answer is taken."""

    def __init__(
        self,
        max_loras: int = 2,
        max_cpu_loras: int = 4,
        info: ShardInfo = INFO,
        run_ahead: int = 1,
        is_auto: bool = True,
    ) -> None:
        self.places = AdapterPlaces(max_loras, max_cpu_loras)
        super().__init__(dataclasses.replace(info, max_loras=max_loras), run_ahead, self.places)
        self.is_auto = is_auto
        self.max_cpu_loras = max_cpu_loras
        self.loading: list[str] = []
        self.loads: list[str] = []
        self.sent: collections.deque[Step] = collections.deque()

    def take_orders(self) -> None:
        """Drops at once; loads at once or later."""
        while orders := self.places.take_orders():
            for order in orders:
                if isinstance(order, DropOrder):
                    self.staged.discard(order.version)
                    self.places.dropped(order.version)
                else:
                    assert isinstance(order, LoadOrder)
                    self.loading.append(order.version)
                    self.loads.append(order.version)
            if self.is_auto:
                for version in list(self.loading):
                    self.end_load(version)
            assert len(self.staged) + len(self.loading) <= self.max_cpu_loras

    @property
    def staged(self) -> set[str]:
        assert self.shards.staged is not None
        return self.shards.staged

    def end_load(self, version: str, error: str = "") -> None:
        """A load under way ends, well unless there is an error."""
        self.loading.remove(version)
        if error:
            self.places.failed(version)
            self.collect(self.scheduler.fail_adapter(version, FailedPrecondition(error)))
            self.places.dropped(version)
        else:
            self.staged.add(version)
            self.places.loaded(version)

    def add(self, request: Submission) -> None:
        self.scheduler.add(request)
        self.take_orders()

    def tick(self) -> bool:
        self.now_s += 1.0
        while len(self.sent) <= self.run_ahead and self.send():
            pass
        self.scheduler.check_integrity()
        happened = self.answer()
        self.scheduler.check_integrity()
        return happened

    def send(self) -> bool:
        """Whether there was a step to send."""
        self.take_orders()
        step = self.scheduler.schedule(self.now_s)
        if step is not None:
            self.sent.append(step)
        self.take_orders()
        return step is not None

    def answer(self) -> bool:
        """Whether there was a step to answer."""
        if not self.sent:
            return False
        self.collect(self.scheduler.postprocess(self.shards.execute(self.sent.popleft()), self.now_s))
        self.take_orders()
        return True

    def running(self) -> list[str | None]:
        """The adapters that run, in order."""
        running = self.scheduler._places.running
        return [s.group.submission.adapter.name if s.group.submission.adapter else None for s in running]
