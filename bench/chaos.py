"""`make soak`: many callers of every kind while shards are killed; each call must end as its caller has to expect.

First every request is answered undisturbed. Then callers cancel, set deadlines, read slowly and send bad input, and
again and again a shard chosen at random gets SIGKILL, each time after a token came since the last recovery. A complete
answer must have exactly the undisturbed tokens, an incomplete one a beginning of them. In the end the server must hold
as much as at the start: no sequence, no block, no call, no more open files.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
from cohort.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

from bench.chaos_requests import MAX_CALLER_WAIT_S, Call, Caller, draw, requests
from bench.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    *("--tensor-parallel-size", "2", "--max-num-seqs", "24", "--num-blocks-override", "160"),
    *("--max-num-queued-reqs", "0", "--max-num-queued-tokens", "0", "--max-restarts", "1000000"),
]
KILL_AFTER_S = (0.5, 6.0)
IDLE_TIMEOUT_S = 60.0
RESTART_TIMEOUT_S = 120.0
POLL_S = 0.02
MIB = 2**20

Tokens = dict[int, list[int]]


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a run gave."""

    ends: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    recoveries_s: list[float] = dataclasses.field(default_factory=list)
    held: list[dict[str, float]] = dataclasses.field(default_factory=list)  # at the start and at the end

    def table(self) -> str:
        """The run as text."""
        lines = [f"{caller:16} {end:20} {count:8,}" for (caller, end), count in sorted(self.ends.items())]
        lines.append(f"tokens read: {self.num_tokens:,}; shards killed: {len(self.recoveries_s)}")
        if self.recoveries_s:
            middle = statistics.median(self.recoveries_s)
            lines.append(f"from SIGKILL to the next token: median {middle:.2f} s, most {max(self.recoveries_s):.2f} s")
        lines += [f"server at the {when}: {facts}" for when, facts in zip(("start", "end"), self.held, strict=False)]
        return "\n".join([*lines, f"faults: {len(self.faults)}", *self.faults[:20]]) + "\n"


class Chaos:
    """One run against `server`."""

    def __init__(self, server: ServerProcess, channel: grpc.aio.Channel, seed: int) -> None:
        self._server = server
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._model = model_pb2_grpc.ModelServiceStub(channel)
        self._rng = random.Random(seed)
        self._requests = requests()
        self._expected: list[Tokens] = []
        self._is_over = False
        self.outcome = Outcome()

    async def run(self, num_clients: int, seconds: float, min_kills: int) -> Outcome:
        """Goes on for `seconds`, and until `min_kills` shards were killed and came back."""
        for number in range(len(self._requests)):
            self._expected.append(await self._undisturbed(number))
        self.outcome.held.append(await self._held())
        end_s = time.monotonic() + seconds
        clients = [asyncio.create_task(self._client(random.Random(self._rng.random()))) for _ in range(num_clients)]
        try:
            while time.monotonic() < end_s or len(self.outcome.recoveries_s) < min_kills:
                await self._kill()
        finally:
            self._is_over = True
            await asyncio.gather(*clients)
        self.outcome.held.append(await self._held())
        return self.outcome

    async def _undisturbed(self, number: int) -> Tokens:
        tokens: Tokens = {}
        await self._read(Call(Caller.PATIENT, number, self._requests[number]), tokens, self._rng)
        return tokens

    async def _client(self, rng: random.Random) -> None:
        while not self._is_over:
            call = draw(rng, self._requests)
            tokens: Tokens = {}
            try:
                end = await self._read(call, tokens, rng)
            except grpc.aio.AioRpcError as error:
                end = error.code().name
                if end != _allowed_error(call):
                    self.outcome.faults.append(f"{call.caller.value}: {end}: {error.details()}")
            expected = self._expected[call.number]
            is_right = tokens == expected if end == "OK" else _begins(expected, tokens)
            if not is_right and call.caller is not Caller.WRONG:
                self.outcome.faults.append(f"{call.caller.value}, request {call.number}: {end} with wrong tokens")
            if call.caller is Caller.WRONG and end == "OK":
                self.outcome.faults.append(f"bad input was answered: {call.request}")
            self.outcome.ends[call.caller.value, end] += 1

    async def _read(self, call: Call, tokens: Tokens, rng: random.Random) -> str:
        """Reads the answer as the caller does into `tokens`, by sequence; how it ended."""
        message = generation_pb2.GenerateStreamRequest(request=call.request)
        stream = self._stub.GenerateStream(message, timeout=call.timeout_s)
        num_read = 0
        async for response in stream:
            if response.HasField("delta"):
                tokens.setdefault(response.delta.index, []).extend(response.delta.token_ids)
                num_read += len(response.delta.token_ids)
                self.outcome.num_tokens += len(response.delta.token_ids)
            if call.caller is Caller.CANCELLING and num_read >= call.num_tokens_read:
                stream.cancel()  # type: ignore[attr-defined]
                return "cancelled"
            if call.caller is Caller.SLOW:
                await asyncio.sleep(rng.uniform(0, MAX_CALLER_WAIT_S))
        return "OK"

    async def _kill(self) -> None:
        """Kills a shard some time after the last recovery's token, and waits for a token of the shards that follow."""
        await asyncio.sleep(self._rng.uniform(*KILL_AFTER_S))
        pids = self._server.shard_pids()
        victim = self._rng.choice(pids)
        os.kill(victim, signal.SIGKILL)
        start_s = time.monotonic()
        while set(self._server.shard_pids()) & set(pids):
            await asyncio.sleep(POLL_S)
            if time.monotonic() - start_s > RESTART_TIMEOUT_S:
                raise TimeoutError("the shards were not started anew")
        # Slow readers still read tokens of before; the token of a new request is of the new shards.
        one = generation_pb2.GenerateRequest(
            text="What?", stopping=generation_pb2.StoppingParams(max_tokens=1), priority=-1
        )
        await self._stub.Generate(one, timeout=RESTART_TIMEOUT_S)  # type: ignore[misc]
        self.outcome.recoveries_s.append(time.monotonic() - start_s)

    async def _held(self) -> dict[str, float]:
        """What the server holds once nothing runs."""
        end_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            load = await self._model.GetLoad(model_pb2.GetLoadRequest(), wait_for_ready=True)
            busy = load.num_running + load.num_waiting
            if not busy and not load.kv_cache_usage:
                break
            if time.monotonic() > end_s:
                self.outcome.faults.append(f"the server does not become idle: {load}")
                break
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(1.0)  # for the last calls to be closed
        open_files, memory_bytes = self._server.held()
        return {
            "sequences": busy,
            "kv_cache_usage": load.kv_cache_usage,
            "open_calls": self._server.num_open_calls(),
            "open_files": open_files,
            "memory_mib": round(memory_bytes / MIB, 1),
        }


def _allowed_error(call: Call) -> str:
    return {Caller.WRONG: call.code, Caller.HURRIED: "DEADLINE_EXCEEDED"}.get(call.caller, "OK")


def _begins(expected: Tokens, tokens: Tokens) -> bool:
    return all(expected.get(index, [])[: len(ids)] == ids for index, ids in tokens.items())


async def run(model_dir: Path, num_clients: int, seconds: float, min_kills: int, seed: int) -> Outcome:
    """Starts a server, lets chaos happen, stops it."""
    with ServerProcess(model_dir, FLAGS, num_threads=1) as server:
        async with grpc.aio.insecure_channel(server.address, [("grpc.enable_http_proxy", 0)]) as channel:
            return await Chaos(server, channel, seed).run(num_clients, seconds, min_kills)


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "demo/cohere")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--min-kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    outcome = asyncio.run(run(flags.model, flags.clients, flags.minutes * 60, flags.min_kills, flags.seed))
    sys.stdout.write(outcome.table())
    return int(bool(outcome.faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
