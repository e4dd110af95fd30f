"""The service as a process: killed, restarted, without Redis, with the wrong settings."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import redis.asyncio
from sandbox_processes import Valkey, below, serving

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_kit.channel import open_channel
from reflux_sandbox.store import PREFIX


@pytest.fixture
async def valkey(tmp_path):
    server = Valkey(tmp_path)
    await server.start()
    yield server
    await server.kill()


def creation(verifier, *answers):
    return pb.CreateVerificationRequest(
        request_id=str(uuid.uuid4()), verifier=verifier, payload=b"{}", answers=answers, run="run"
    )


async def state_of(stub, name):
    return (await stub.GetVerification(pb.GetVerificationRequest(name=name))).verification


async def until_state(stub, name, state):
    for _ in range(3000):
        job = await state_of(stub, name)
        if job.state == state:
            return job
        await asyncio.sleep(0.01)
    pytest.fail(f"{name} did not reach {state}")


async def ended_count(valkey):
    client = redis.asyncio.from_url(valkey.url)
    count = await client.xlen(f"{PREFIX}ended:run")
    await client.aclose()
    return count


async def test_kill_9_in_mid_job_and_every_job_ends_once_after_the_restart(namespaces, valkey, here):
    async with serving(valkey, here) as sandbox:
        async with open_channel(sandbox.address) as channel:
            stub = SandboxServiceStub(channel)
            slow = (await stub.CreateVerification(creation("test/slow", "1"))).verification.name
            requests = [creation("test/hang", f"x{number}") for number in range(20)]
            others = [(await stub.CreateVerification(request)).verification.name for request in requests]
            await until_state(stub, slow, Verification.STATE_RUNNING)
        tree = below(sandbox.process.pid)
        await sandbox.kill()
        async with asyncio.timeout(60):
            while any(Path(f"/proc/{pid}").exists() for pid in tree):
                await asyncio.sleep(0.01)
        await sandbox.start()
        async with open_channel(sandbox.address) as channel:
            stub = SandboxServiceStub(channel)
            job = await until_state(stub, slow, Verification.STATE_ENDED)
            assert (job.attempts, job.grades[0].outcome) == (2, Grade.OUTCOME_SCORED)
            for name in others:
                job = await until_state(stub, name, Verification.STATE_ENDED)
                assert job.grades[0].outcome == Grade.OUTCOME_SCORED
            again = (await stub.CreateVerification(requests[0])).verification
            assert again.name == others[0]
        assert await ended_count(valkey) == 21


async def test_two_seconds_without_redis_lose_nothing(namespaces, valkey, here):
    async with serving(valkey, here) as sandbox, open_channel(sandbox.address) as channel:
        stub = SandboxServiceStub(channel)
        slow = (await stub.CreateVerification(creation("test/slow", "0.5"))).verification.name
        await until_state(stub, slow, Verification.STATE_RUNNING)
        await valkey.kill()
        waiting = asyncio.ensure_future(stub.CreateVerification(creation("test/length", "abc"), timeout=20))
        await asyncio.sleep(2)
        await valkey.start()
        job = await until_state(stub, slow, Verification.STATE_ENDED)
        assert (job.attempts, job.grades[0].outcome) == (1, Grade.OUTCOME_SCORED)
        created = (await waiting).verification
        job = await until_state(stub, created.name, Verification.STATE_ENDED)
        assert job.grades[0].reward == 3.0
        assert await ended_count(valkey) == 2
        log = await sandbox.kill(signal.SIGTERM)
        assert "Traceback" not in log


async def test_sigterm_gives_running_jobs_back_and_leaves_no_process(namespaces, valkey, here):
    async with serving(valkey, here, REFLUX_SANDBOX_DRAIN_SECONDS="0") as sandbox:
        async with open_channel(sandbox.address) as channel:
            stub = SandboxServiceStub(channel)
            name = (await stub.CreateVerification(creation("test/slow", "30"))).verification.name
            await until_state(stub, name, Verification.STATE_RUNNING)
        tree = below(sandbox.process.pid)
        log = await sandbox.kill(signal.SIGTERM)
        assert sandbox.process.returncode == 0
        assert "Traceback" not in log
        assert not any(Path(f"/proc/{pid}").exists() for pid in tree)
    client = redis.asyncio.from_url(valkey.url)
    job = await client.hmget(f"{PREFIX}job:{name.removeprefix('verifications/')}", "state", "attempts")
    await client.aclose()
    assert job == [b"queued", b"0"]


async def test_an_absent_redis_is_one_line_and_exit_code_2(tmp_path):
    environment = {**os.environ, "REFLUX_REDIS_URL": f"unix://{tmp_path}/none.sock"}
    command = [sys.executable, "-m", "reflux_sandbox.main"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    lines = [line for line in err.decode().splitlines() if line.startswith("reflux-sandbox: ")]
    assert (process.returncode, len(lines)) == (2, 1)
    assert "REFLUX_REDIS_URL" in lines[0]
    assert b"Traceback" not in err
