"""A step that was given to the device, and how its outcome is had."""

from __future__ import annotations

import dataclasses

import numpy as np

from shard_server.batch import Batch
from shard_server.link import RowResults, StepOutcome
from shard_server.sampler import Samples
from shard_server.sampling_rows import SamplingRows
from shard_server.staging import Readback
from shard_server.step_clock import StepTiming


@dataclasses.dataclass(frozen=True, slots=True)
class PendingRows:
    """Results of a step's rows on their way to the host.

    `readback` holds token ids, flags and, where rows want them, the three tensors of Logprobs; or both of the first
    in one tensor, as graphs leave them, `[2 * B]` for B rows of which the last may be padding.
    """

    batch: Batch
    rows: SamplingRows
    readback: Readback
    is_joined: bool = False

    @classmethod
    def of(cls, batch: Batch, rows: SamplingRows, samples: Samples) -> PendingRows:
        """Sends samples on their way."""
        tensors = [samples.token_ids, samples.is_finite]
        if samples.logprobs is not None:
            tensors += [samples.logprobs.sampled, samples.logprobs.top_token_ids, samples.logprobs.top]
        return cls(batch, rows, Readback(*tensors))

    def read(self) -> RowResults:
        """The rows in the router's order, once the device has ended the step."""
        batch, rows = self.batch, self.rows
        columns = self.readback.read()
        if self.is_joined:
            columns = [half[: len(batch.slots)] for half in columns[0].reshape(2, -1)]
        token_ids, is_finite, *rest = columns
        logprobs, top_ids, top = rest or (np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32))
        if rest:
            order = np.arange(len(logprobs)) if batch.order is None else np.argsort(batch.order[rows.logprob_rows])
            is_wanted = np.arange(top_ids.shape[1]) < rows.num_logprobs[order].reshape(-1, 1)
            logprobs, top_ids, top = logprobs[order], top_ids[order][is_wanted], top[order][is_wanted]
        token_ids = batch.restore(token_ids)[batch.restore(batch.is_sampled)]
        return RowResults(batch.restore(is_finite) != 0, token_ids, logprobs, top_ids, top)


@dataclasses.dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; `rows` is None where it ran out of device memory. Finish steps in the order of their launch."""

    step_id: int
    timing: StepTiming
    rows: PendingRows | RowResults | None

    def finish(self) -> StepOutcome:
        """Waits for the device; from any thread."""
        step_s, idle_s = self.timing.wait()
        rows = self.rows.read() if isinstance(self.rows, PendingRows) else self.rows
        return StepOutcome(self.step_id, step_s, idle_s, rows)
