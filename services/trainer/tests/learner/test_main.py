"""The process: announces itself for as long as it lives, and says in one line why it cannot start."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer, add_TrainerServiceServicer_to_server
from reflux_kit.channel import open_channel
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_trainer.learner.main import build
from reflux_trainer.learner.settings import LearnerSettings
from reflux_transfer.settings import TransferSettings

from .fake_broker import FakeBroker
from .tiny import tiny_folder


class FakeTrainer(TrainerServiceServicer):
    """Counts announcements."""

    def __init__(self) -> None:
        self.heard: list[pb.RegisterLearnerRequest] = []
        self.twice = asyncio.Event()

    async def RegisterLearner(self, request: pb.RegisterLearnerRequest, context: Any) -> pb.RegisterLearnerResponse:
        self.heard.append(request)
        if len(self.heard) == 2:
            self.twice.set()
        return pb.RegisterLearnerResponse(heartbeat_seconds=0.05)


async def test_a_learner_announces_its_address_again_and_again() -> None:
    trainer = FakeTrainer()
    mount = Mount(trainer, add_TrainerServiceServicer_to_server, "reflux.trainer.v1.TrainerService")
    async with running(Service((mount,)), ServiceSettings(drain_seconds=0)) as bound:
        settings = LearnerSettings(run="run-1", trainer_address=bound.grpc, drain_seconds=0)
        async with build(settings) as service, running(service, settings) as served:
            async with asyncio.timeout(10):
                await trainer.twice.wait()
            assert {(each.run, each.address) for each in trainer.heard} == {("run-1", served.grpc)}
            async with open_channel(trainer.heard[0].address) as channel:
                stub: Any = LearnerServiceStub(channel)
                status = await stub.GetLearner(learner_pb.GetLearnerRequest())
            assert status.incarnation == trainer.heard[0].incarnation
            assert status.model_id == ""


async def test_a_learner_says_at_its_start_which_transports_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with build(LearnerSettings(run="run-1")):
        assert "transfer backend" in caplog.text


async def test_a_learner_tells_the_broker_what_its_self_test_found() -> None:
    broker = FakeBroker()
    async with (
        running(Service((broker.mount(),)), ServiceSettings(drain_seconds=0)) as bound,
        build(LearnerSettings(run="run-1", broker_address=bound.grpc, transport="tcp")),
        asyncio.timeout(10),
    ):
        report = await broker.paths.get()
    assert report.process == "learners/run-1"
    (chosen,) = (path for path in report.paths if path.chosen)
    assert (chosen.transport, chosen.peer) == ("tcp", "")
    assert chosen.bytes_per_second > 0


async def test_a_transport_that_failed_its_self_test_is_an_error_that_says_so(tmp_path: Path) -> None:
    broken = TransferSettings(ucx_library="/nonexistent/libucp.so.0")
    settings = LearnerSettings(run="run-1", transport="ucx", transfer=broken, drain_seconds=0)
    async with build(settings) as service, running(service, settings) as served, open_channel(served.grpc) as channel:
        stub: Any = LearnerServiceStub(channel)
        for transport in ("ucx", "auto"):
            request = learner_pb.CreateModelRequest(
                model_id="run-1", path=str(tiny_folder(tmp_path / transport)), transport=transport
            )
            with pytest.raises(grpc.aio.AioRpcError, match=r"/nonexistent/libucp\.so\.0") as caught:
                await stub.CreateModel(request)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_auto_is_the_transport_that_the_probe_chose(tmp_path: Path) -> None:
    broken, broker = TransferSettings(ucx_library="/nonexistent/libucp.so.0"), FakeBroker()
    async with running(Service((broker.mount(),)), ServiceSettings(drain_seconds=0)) as bound:
        settings = LearnerSettings(run="run-1", broker_address=bound.grpc, transfer=broken, drain_seconds=0)
        async with build(settings) as service, running(service, settings) as served, open_channel(served.grpc) as door:
            stub: Any = LearnerServiceStub(door)
            folder = str(tiny_folder(tmp_path / "model"))
            await stub.CreateModel(learner_pb.CreateModelRequest(model_id="run-1", path=folder, transport="auto"))
            await stub.PublishWeights(learner_pb.PublishWeightsRequest(request_id="a", model_id="run-1"))
    assert [region.transport for region in broker.begun[0].regions] == ["shm"]


async def test_a_batch_of_many_megabytes_is_taken() -> None:
    settings = LearnerSettings(run="run-1", trainer_address="127.0.0.1:1", drain_seconds=0)
    completion = learner_pb.Completion(token_ids=[1] * 1_000_000, behaviour_logprobs=[-1.0] * 1_000_000)
    group = learner_pb.PromptGroup(prompt_token_ids=[1], completions=[completion, completion])
    request = learner_pb.ForwardBackwardRequest(op_id=1, model_id="run-1", groups=[group])
    assert request.ByteSize() > 8 << 20
    async with build(settings) as service, running(service, settings) as served, open_channel(served.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await LearnerServiceStub(channel).ForwardBackward(request)  # type: ignore[misc]
    assert caught.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stack_with_a_secret_refuses_calls_without_a_token() -> None:
    settings = LearnerSettings(run="run-1", trainer_address="127.0.0.1:1", stack_secret="s", drain_seconds=0)
    async with build(settings) as service, running(service, settings) as served, open_channel(served.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await LearnerServiceStub(channel).GetLearner(learner_pb.GetLearnerRequest())  # type: ignore[misc]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_learner_without_a_run_says_so_in_one_line_and_exits_with_2() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFLUX_")}
    done = subprocess.run(
        [sys.executable, "-m", "reflux_trainer.learner.main"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "REFLUX_RUN" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "status"), [("rank", 1), ("all", 0)])
async def test_a_learner_whose_rank_dies_fails_with_the_cause_and_one_that_is_told_to_end_does(
    tmp_path: Path, victim: str, status: int
) -> None:
    trainer = FakeTrainer()
    mount = Mount(trainer, add_TrainerServiceServicer_to_server, "reflux.trainer.v1.TrainerService")
    async with running(Service((mount,)), ServiceSettings(drain_seconds=0)) as bound:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REFLUX_")}
        environment |= {"REFLUX_RUN": "run-1", "REFLUX_TRAINER_ADDRESS": bound.grpc, "REFLUX_LEARNER_RANKS": "2"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "reflux_trainer.learner.main", env=environment, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            await trainer.twice.wait()
            async with open_channel(trainer.heard[0].address) as channel:
                stub: Any = LearnerServiceStub(channel)
                folder = str(tiny_folder(tmp_path / "model"))
                request = learner_pb.CreateModelRequest(model_id="run-1", path=folder, transport="shm")
                await stub.CreateModel(request, timeout=90)
            threads = Path(f"/proc/{process.pid}/task").glob("*/children")
            pids = [pid for thread in threads for pid in thread.read_text().split()]
            ranks = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            for pid, number in [(int(ranks[0]), 9)] if victim == "rank" else [(int(ranks[0]), 15), (process.pid, 15)]:
                os.kill(pid, number)
            assert process.stderr is not None
            told = await process.stderr.read()
            assert await process.wait() == status
    named = f"the process of rank 1 (pid {ranks[0]}) ended with status -9".encode() in told
    assert named == (victim == "rank"), told
