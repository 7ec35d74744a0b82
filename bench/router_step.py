"""The router's own cost of a decode step, measured with a shard link that answers at once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from cohort.shard.v1 import shard_pb2

from bench.offline import OfflineRouter
from bench.workloads import Request
from router.detokenizer import ByteDetokenizer, Detokenizer
from router.scheduler import MakeDetokenizer
from router.step import ShardInfo, Step, StepResult
from router.step_codec import pack_step, unpack_result

PROMPT_LEN = 16
WARM_STEPS = 20
NUM_STEPS = 200
FIRST_TOKEN = 100
VOCAB_SIZE = 2000
WORDS = [f" w{token_id}".encode() for token_id in range(VOCAB_SIZE)]


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """`step_us`: microseconds that the router spends per decode step of `num_rows` rows, one token each."""

    num_rows: int
    step_us: float


class ScriptedLink:
    """Samples token FIRST_TOKEN + row for every row, in no time. Steps and answers are packed as for a shard."""

    def __init__(self, info: ShardInfo, step_s: float = 0.0, idle_s: float = 0.0) -> None:
        """`step_s` and `idle_s` are what it claims of every step."""
        self.info = info
        self._step_s, self._idle_s = step_s, idle_s
        self.decode_times: list[float] = []
        self._sent: asyncio.Queue[Step] = asyncio.Queue()
        self._num_logprobs = dict.fromkeys(range(info.max_num_seqs), -1)

    def send(self, step: Step) -> None:
        """Packs the step, as the real link does, and forgets the bytes."""
        pack_step(step).SerializeToString()
        self._sent.put_nowait(step)

    async def receive(self) -> StepResult:
        """The next step's answer; notes when that of a full decode step was taken."""
        step = await self._sent.get()
        num_rows, num_sampled = len(step.scheduled), sum(row.is_sampled for row in step.scheduled)
        if num_rows == self.info.max_num_seqs:
            self.decode_times.append(time.perf_counter())
        tokens = array("i", range(FIRST_TOKEN, FIRST_TOKEN + num_sampled)).tobytes()
        message = shard_pb2.StepResult(
            step_id=step.step_id,
            status=shard_pb2.STEP_STATUS_OK,
            is_finite=bytes([1]) * num_rows,
            token_ids=tokens,
            step_s=self._step_s,
            device_idle_s=self._idle_s,
        )
        return unpack_result(message, step, self._num_logprobs)

    async def close(self) -> None:
        """Nothing to close."""


def byte_detokenizer(skip_special_tokens: bool) -> Detokenizer:
    """A sequence's decoder over the scripted vocabulary, of the kind that Command models use."""
    return ByteDetokenizer(WORDS)


def scripted_info(num_rows: int) -> ShardInfo:
    """Facts of a shard that runs `num_rows` sequences at once."""
    return ShardInfo(
        model_fingerprint="scripted",
        world_size=1,
        block_size=16,
        num_blocks=64 + num_rows * 32,
        max_model_len=512,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(2048, num_rows * PROMPT_LEN),
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        device="cpu",
        attention_backend="torch",
    )


async def _step_s(num_rows: int, make_detokenizer: MakeDetokenizer) -> float:
    link = ScriptedLink(scripted_info(num_rows))
    router = OfflineRouter(link, make_detokenizer, run_ahead=1)
    router.start()
    await router.generate([Request([20 + row] * PROMPT_LEN, WARM_STEPS + NUM_STEPS) for row in range(num_rows)])
    await router.stop()
    times = link.decode_times[WARM_STEPS // 2 : -WARM_STEPS // 2]
    return (times[-1] - times[0]) / (len(times) - 1)


def measure_steps(num_rows: int, make_detokenizer: MakeDetokenizer = byte_detokenizer) -> StepCost:
    """Mean over full decode steps: schedule, pack, unpack the answer, stop checks, detokenize, deliver."""
    return StepCost(num_rows, asyncio.run(_step_s(num_rows, make_detokenizer)) * 1e6)


def measure_apart(rows: Sequence[int]) -> list[StepCost]:
    """measure_steps in a process of its own: garbage collection here would also walk torch's and transformers' objects,
    which no router has."""
    command = [sys.executable, "-m", "bench.router_step", *map(str, rows)]
    root = Path(__file__).resolve().parent.parent
    answer = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
    return [StepCost(**fields) for fields in json.loads(answer.stdout)]


if __name__ == "__main__":
    json.dump([dataclasses.asdict(measure_steps(int(rows))) for rows in sys.argv[1:]], sys.stdout)
