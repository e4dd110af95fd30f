"""kill -9 of everything in turn while jobs run: each ends exactly once, with the right outcome, and nothing is left."""

import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections import Counter

import grpc
import pytest
import redis.asyncio
from sandbox_processes import Valkey, below, serving

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade
from reflux_kit.channel import open_channel
from reflux_sandbox.store import PREFIX

BATCH = 20
HANG_SECONDS = 240
KILLS = ("service", "redis", "descendant", "descendant")
"""A descendant of the service is a warm parent, a supervisor or a child."""


def requests_of(dice, jobs):
    """Jobs of all kinds, a third of them with answers that others have too."""
    requests = []
    for number in range(jobs):
        verifier = dice.choice(["test/length", "test/length", "test/apart", "test/slow", "test/hang"])
        answers = ["0.0" + str(dice.randrange(10)) for _ in range(dice.choice([1, 1, 3]))]
        if dice.random() < 0.66 and verifier != "test/slow":
            answers = [f"{number} {answer}" for answer in answers]
        if number % 50 == 7:
            verifier, answers = "test/malformed", [f"{number}"]
        requests.append(
            pb.CreateVerificationRequest(
                request_id=str(uuid.UUID(int=dice.getrandbits(128), version=4)),
                verifier=verifier,
                payload=b"{}",
                answers=answers,
                run="run",
                deadline_seconds=HANG_SECONDS,
                sample_ids=[f"{number}/{index}" for index in range(len(answers))],
            )
        )
    return requests


async def create(sandbox, requests):
    """Stores a batch whatever dies meanwhile; the request ids make it safe."""
    while True:
        try:
            async with open_channel(sandbox.address) as channel:
                batch = pb.BatchCreateVerificationsRequest(requests=requests)
                return (await SandboxServiceStub(channel).BatchCreateVerifications(batch, timeout=30)).verifications
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            await asyncio.sleep(0.05)


async def kill(what, sandbox, valkey, dice):
    if what == "service":
        await sandbox.kill()
        await sandbox.start()
    elif what == "redis":
        await valkey.kill()
        await valkey.start()
    elif victims := below(sandbox.process.pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(dice.choice(victims), signal.SIGKILL)


def connect(valkey):
    """A busy machine may take long over an answer."""
    return redis.asyncio.from_url(valkey.url, socket_timeout=HANG_SECONDS)


async def endings(valkey, count):
    """Ids of ended jobs as often as they ended, once `count` different ones have."""
    key, ids = f"{PREFIX}ended:run", Counter()
    async with connect(valkey) as client, asyncio.timeout(HANG_SECONDS):
        while len(ids) < count:
            await asyncio.sleep(0.05)
            if await client.xlen(key) >= count:
                ids = Counter(fields[b"id"].decode() for _, fields in await client.xrange(key))
    return ids


async def left_over(valkey):
    async with connect(valkey) as client:
        keys = [key.decode().removeprefix(PREFIX) async for key in client.scan_iter(f"{PREFIX}*")]
        dead = await client.zcard(f"{PREFIX}dead")
    kept = ("job", "cache", "ended", "report", "runs", "reuse", "bytes", "dead") + (("payload",) if dead else ())
    return [key for key in keys if key.split(":")[0] not in kept]


def right(request, job):
    outcomes = {grade.outcome for grade in job.grades}
    if request.verifier == "test/malformed":
        return outcomes == {Grade.OUTCOME_INFRA_ERROR}
    rewards = [grade.reward for grade in job.grades]
    return outcomes == {Grade.OUTCOME_SCORED} and rewards == [len(answer) for answer in request.answers]


async def run_matrix(seed, jobs, kills, tmp_path, here):
    dice = random.Random(seed)
    valkey = Valkey(tmp_path, fsync="always")
    await valkey.start()
    requests = requests_of(dice, jobs)
    points = sorted(dice.randrange(jobs) for _ in range(kills))
    try:
        async with serving(valkey, here, REFLUX_SANDBOX_MOST_ATTEMPTS="50") as sandbox:
            names = []
            for start in range(0, jobs, BATCH):
                names += [job.name for job in await create(sandbox, requests[start : start + BATCH])]
                while points and points[0] < start + BATCH:
                    points.pop(0)
                    await asyncio.sleep(dice.random() * 0.1)  # another moment in the life of the jobs each time
                    await kill(dice.choice(KILLS), sandbox, valkey, dice)
            ended = await endings(valkey, jobs)
            assert set(ended.values()) == {1}
            async with open_channel(sandbox.address) as channel:
                stub = SandboxServiceStub(channel)
                for name, request in zip(names, requests, strict=True):
                    job = (await stub.GetVerification(pb.GetVerificationRequest(name=name))).verification
                    assert right(request, job), (request, job)
            assert await left_over(valkey) == []
    finally:
        await valkey.kill()


@pytest.mark.parametrize("seed", range(3))
async def test_each_job_ends_once_and_right_whatever_is_killed(namespaces, tmp_path, here, seed):
    await run_matrix(seed, 60, 3, tmp_path, here)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3, 6))
async def test_a_thousand_jobs_end_once_and_right_whatever_is_killed(namespaces, tmp_path, here, seed):
    await run_matrix(seed, 1000, 40, tmp_path, here)
