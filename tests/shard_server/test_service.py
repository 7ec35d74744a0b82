"""The link's rules over a real unix socket, with a runner whose steps can be held up or made to fail."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from cohort.shard.v1 import shard_pb2, shard_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shard_server.adapters import StagedAdapters
from shard_server.errors import ProtocolError
from shard_server.link import LINK_VERSION, RowResults, StepOutcome, StepWork
from shard_server.loader import ShardFacts
from shard_server.server import OPTIONS
from shard_server.service import ShardService
from shard_server.worker import Worker
from tests.shard_server.steps import ints, step
from tests.shard_server.test_adapters import Disk, Slices

LIMIT_S = 20
STATUS_S = 0.2
FACTS = ShardFacts("f", 0, 1, 16, 9, 64, 4, 32, 100, "float32", "cpu", "torch", {"load": 1.5})


class Launched:
    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    def finish(self) -> StepOutcome:
        return self._outcome


class FakeRunner:
    """Answers a step with its number as the one token. Step 100 fails, step 101 breaks a rule, 102 wants memory."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[int] = []
        self.num_resets = 0

    def launch(self, work: StepWork) -> Launched:
        return Launched(self._answer(work))

    def _answer(self, work: StepWork) -> StepOutcome:
        assert self.gate.wait(LIMIT_S)
        self.seen.append(work.step_id)
        if work.step_id == 100:
            raise ZeroDivisionError("a cause")
        if work.step_id == 101:
            raise ProtocolError("block 0 is outside [1, 9)")
        if work.step_id == 102:
            return StepOutcome(work.step_id, 0.5, 0.25, None)
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        rows = RowResults(np.ones(1, np.bool_), np.array([work.step_id], np.int32), floats, ints, floats)
        return StepOutcome(work.step_id, 0.5, 0.25, rows)

    def reset(self) -> None:
        self.num_resets += 1


class Rig:
    """A server on a unix socket and its client."""

    def __init__(self, address: str) -> None:
        self.runner = FakeRunner()
        self.errors: list[BaseException] = []
        self.service = ShardService(Worker(), self._fail)
        self.server = grpc.aio.server(options=OPTIONS)
        shard_pb2_grpc.add_ShardServiceServicer_to_server(self.service, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)
        self.server.add_insecure_port(address)
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = shard_pb2_grpc.ShardServiceStub(self.channel)

    def _fail(self, error: BaseException) -> str:
        self.errors.append(error)
        return f"rank 0: {error}"

    async def open(self, epoch: int, router_id: str = "one", version: int = LINK_VERSION) -> Stream:
        stream = Stream(self.stub.Execute(timeout=LIMIT_S))
        hello = shard_pb2.Hello(link_version=version, epoch=epoch, router_id=router_id)
        await stream.call.write(shard_pb2.ExecuteRequest(hello=hello))
        answer = await stream.call.read()
        assert answer.hello.epoch == epoch
        return stream


class Stream:
    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call

    async def send(self, *step_ids: int) -> None:
        for step_id in step_ids:
            await self.call.write(shard_pb2.ExecuteRequest(step=step(step_id, [])))

    async def receive(self) -> shard_pb2.StepResult:
        answer = await self.call.read()
        return answer.result

    async def status(self) -> tuple[grpc.StatusCode, str]:
        await self.call.code()
        await asyncio.sleep(STATUS_S)  # A write that the break interrupts first sets a status of grpc's own.
        return await self.call.code(), await self.call.details()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(f"unix:{tmp_path}/shard.sock")
    await rig.server.start()
    rig.service.set_ready(rig.runner, FACTS)
    yield rig
    rig.runner.gate.set()
    await rig.channel.close()
    await rig.server.stop(0)


async def refused(rig: Rig, epoch: int, **hello: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.open(epoch, **hello)  # type: ignore[arg-type]
    return caught.value.code(), str(caught.value.details())


async def test_nothing_is_served_while_the_model_loads(rig: Rig) -> None:
    rig.service._runner = rig.service._facts = None
    assert await refused(rig, 1) == (grpc.StatusCode.UNAVAILABLE, "the model is still loading")
    with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
        await rig.stub.GetInfo(shard_pb2.GetInfoRequest(), timeout=LIMIT_S)


async def test_info_has_every_fact(rig: Rig) -> None:
    info = await rig.stub.GetInfo(shard_pb2.GetInfoRequest(), timeout=LIMIT_S)
    assert info == shard_pb2.GetInfoResponse(
        link_version=2,
        model_fingerprint="f",
        rank=0,
        world_size=1,
        block_size=16,
        num_blocks=9,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        vocab_size=100,
        dtype="float32",
        device="cpu",
        attention_backend="torch",
        startup_phase_s={"load": 1.5},
    )


async def test_adapters_are_staged_and_dropped_beside_steps_and_told_by_info(rig: Rig) -> None:
    disk = Disk()
    facts = dataclasses.replace(FACTS, max_loras=2, max_lora_rank=8)
    rig.service.set_ready(rig.runner, facts, StagedAdapters(disk))
    stream = await rig.open(1)
    rig.runner.gate.clear()  # A step is under way all the time.
    await stream.send(1)
    answer = await rig.stub.LoadAdapter(shard_pb2.LoadAdapterRequest(version="v1"), timeout=LIMIT_S)
    assert answer.rank == Slices.rank and answer.load_s > 0
    info = await rig.stub.GetInfo(shard_pb2.GetInfoRequest(), timeout=LIMIT_S)
    assert (info.max_loras, info.max_lora_rank, list(info.adapter_versions)) == (2, 8, ["v1"])
    await rig.stub.UnloadAdapter(shard_pb2.UnloadAdapterRequest(version="v1"), timeout=LIMIT_S)
    assert not (await rig.stub.GetInfo(shard_pb2.GetInfoRequest(), timeout=LIMIT_S)).adapter_versions
    rig.runner.gate.set()
    assert (await stream.receive()).step_id == 1 and rig.errors == []


async def test_an_adapter_that_cannot_be_applied_is_refused_with_the_models_reason(rig: Rig) -> None:
    disk = Disk()
    disk.broken.add("v1")
    rig.service.set_ready(rig.runner, FACTS, StagedAdapters(disk))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.LoadAdapter(shard_pb2.LoadAdapterRequest(version="v1"), timeout=LIMIT_S)
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "lora_A is missing",
    )


async def test_adapters_are_refused_while_lora_is_off(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="LoRA is off on this shard"):
        await rig.stub.LoadAdapter(shard_pb2.LoadAdapterRequest(version="v1"), timeout=LIMIT_S)
    await rig.stub.UnloadAdapter(shard_pb2.UnloadAdapterRequest(version="v1"), timeout=LIMIT_S)


async def test_steps_are_answered_in_order_with_rows_from_rank_0(rig: Rig) -> None:
    stream = await rig.open(1)
    await stream.send(1, 2, 102, 4)
    answers = [await stream.receive() for _ in range(4)]
    assert [answer.step_id for answer in answers] == [1, 2, 102, 4]
    assert [ints(answer.token_ids) for answer in answers] == [[1], [2], [], [4]]
    ok, lost = shard_pb2.STEP_STATUS_OK, shard_pb2.STEP_STATUS_OUT_OF_MEMORY
    assert [answer.status for answer in answers] == [ok, ok, lost, ok]
    assert answers[0].step_s == 0.5 and answers[0].device_idle_s == 0.25 and answers[0].is_finite == b"\1"


async def test_other_ranks_answer_without_rows(rig: Rig) -> None:
    rig.service.set_ready(rig.runner, dataclasses.replace(FACTS, rank=1))
    stream = await rig.open(1)
    await stream.send(7)
    assert await stream.receive() == shard_pb2.StepResult(
        step_id=7, status=shard_pb2.STEP_STATUS_OK, step_s=0.5, device_idle_s=0.25
    )


async def test_health_answers_during_a_step_and_steps_queue_behind_it(rig: Rig) -> None:
    stream = await rig.open(1)
    rig.runner.gate.clear()
    await stream.send(1, 2, 3)
    checker = health_pb2_grpc.HealthStub(rig.channel)
    for _ in range(3):
        answer = await checker.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert rig.runner.seen == []
    rig.runner.gate.set()
    assert [(await stream.receive()).step_id for _ in range(3)] == [1, 2, 3]


async def test_a_second_router_is_refused_and_the_first_is_unharmed(rig: Rig) -> None:
    stream = await rig.open(1)
    code, text = await refused(rig, 2, router_id="two")
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert text == "router one holds epoch 1; its stream must end first"
    await stream.send(1)
    assert (await stream.receive()).step_id == 1


async def test_the_next_epoch_may_open_when_the_stream_has_ended_and_rows_are_dropped(rig: Rig) -> None:
    first = await rig.open(3)
    await first.send(1)
    await first.receive()
    await first.call.done_writing()
    assert await first.call.read() is grpc.aio.EOF
    assert await first.status() == (grpc.StatusCode.OK, "")
    for epoch in (2, 3):
        code, text = await refused(rig, epoch)
        assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, f"epoch {epoch} is not above 3, the last one")
    second = await rig.open(4)
    await second.send(1)
    assert (await second.receive()).step_id == 1
    assert rig.runner.num_resets == 2


async def test_after_a_router_vanished_its_steps_end_before_the_next_epoch_opens(rig: Rig) -> None:
    first = await rig.open(1)
    rig.runner.gate.clear()
    await first.send(1, 2)
    await asyncio.sleep(0.2)
    first.call.cancel()
    for _ in range(LIMIT_S * 20):
        if rig.service._open is None:
            break
        await asyncio.sleep(0.05)
    opening = asyncio.create_task(rig.open(2, router_id="two"))
    await asyncio.sleep(0.2)
    assert not opening.done(), "the rows of epoch 1 are still in use"
    rig.runner.gate.set()
    await opening
    assert rig.runner.seen == [1, 2] and rig.runner.num_resets == 2


async def test_a_broken_rule_ends_the_epoch_naming_it_and_later_steps_do_not_run(rig: Rig) -> None:
    stream = await rig.open(1)
    rig.runner.gate.clear()
    await stream.send(1, 101, 102)
    rig.runner.gate.set()
    assert (await stream.receive()).step_id == 1
    assert await stream.status() == (grpc.StatusCode.INVALID_ARGUMENT, "block 0 is outside [1, 9)")
    again = await rig.open(2)
    assert rig.runner.seen == [1, 101] and not rig.errors
    await again.send(1)
    assert (await again.receive()).step_id == 1


async def test_a_failing_step_ends_the_epoch_with_its_cause(rig: Rig) -> None:
    stream = await rig.open(1)
    await stream.send(100, 1)
    assert await stream.status() == (grpc.StatusCode.INTERNAL, "rank 0: a cause")
    assert [type(error) for error in rig.errors] == [ZeroDivisionError]
    await rig.open(2)
    assert rig.runner.seen == [100]


async def test_a_stream_begins_with_hello_of_this_version_and_has_one(rig: Rig) -> None:
    code, text = await refused(rig, 1, version=9)
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, "link_version is 9, but this shard speaks 2")
    stream = Stream(rig.stub.Execute(timeout=LIMIT_S))
    await stream.send(1)
    assert await stream.status() == (grpc.StatusCode.INVALID_ARGUMENT, "the stream's first message must be hello")
    stream = await rig.open(1)
    await stream.call.write(shard_pb2.ExecuteRequest(hello=shard_pb2.Hello(link_version=2, epoch=2)))
    assert await stream.status() == (grpc.StatusCode.INVALID_ARGUMENT, "hello comes once, then steps")


async def test_a_step_larger_than_grpcs_own_limit_passes(rig: Rig) -> None:
    stream = await rig.open(1)
    message = step(1, [])
    message.filled.token_ids = bytes(6_000_000)
    message.filled.slots = message.filled.starts = bytes(4)
    message.filled.counts = np.array([1_500_000], "<i4").tobytes()
    await stream.call.write(shard_pb2.ExecuteRequest(step=message))
    assert (await stream.receive()).step_id == 1
