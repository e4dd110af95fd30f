"""The service with places elsewhere: a /verify server and a worker of a folder, from creation to the grade."""

import asyncio
import contextlib
import uuid

import pytest
from aiohttp import web

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_kit.channel import open_channel
from reflux_kit.server import running
from reflux_sandbox.main import build
from reflux_sandbox.remote.mailbox import Mailbox
from reflux_sandbox.remote.settings import FolderSettings, HttpSettings, RemoteSettings
from reflux_sandbox.remote.worker import work
from reflux_sandbox.settings import SandboxSettings

HANG_SECONDS = 60


class Node:
    async def grade(self, request):
        rows = [{"outcome": "scored", "reward": 7.0, "figures": {}, "message": "elsewhere"} for _ in request["answers"]]
        return {"grades": rows}


@pytest.fixture
async def gym():
    calls = []

    async def verify(request):
        calls.append(await request.json())
        return web.json_response({"reward": 0.5})

    app = web.Application()
    app.router.add_post("/verify", verify)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", calls
    await runner.cleanup()


@pytest.fixture
async def stub(gym, valkey_url, here, tmp_path):
    remote = RemoteSettings(
        routes={"test/length": "folder"},
        folder=FolderSettings(folder=str(tmp_path)),
        http={"gym/verify": HttpSettings(url=gym[0], version="1", seed_session=False)},
    )
    settings = SandboxSettings(
        listen="127.0.0.1:0", redis_url=valkey_url, isolation="process", graders="sample_graders",
        import_folders=(here,), idle_children=1, drain_seconds=0, remote=remote,
    )  # fmt: skip
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        worker = asyncio.create_task(work(Mailbox(tmp_path), Node()))
        yield SandboxServiceStub(channel)
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker


async def graded(stub, verifier, *answers):
    request = pb.CreateVerificationRequest(
        request_id=str(uuid.uuid4()), verifier=verifier, payload=b"{}", answers=answers, run=f"run-{uuid.uuid4().hex}"
    )
    name = (await stub.CreateVerification(request)).verification.name
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            job = (await stub.GetVerification(pb.GetVerificationRequest(name=name))).verification
            if job.state == Verification.STATE_ENDED:
                return job
            await asyncio.sleep(0.02)


async def test_jobs_go_where_their_verifier_lives_and_equal_answers_go_once(stub, gym):
    assert "gym/verify" in (await stub.GetStatus(pb.GetStatusRequest())).verifiers
    job = await graded(stub, "gym/verify", *["4"] * 8)
    assert [(grade.outcome, grade.reward) for grade in job.grades] == [(Grade.OUTCOME_SCORED, 0.5)] * 8
    assert len(gym[1]) == 1, "equal answers were verified more than once"
    elsewhere = await graded(stub, "test/length", "a", "bb")
    assert [grade.reward for grade in elsewhere.grades] == [7.0, 7.0]
