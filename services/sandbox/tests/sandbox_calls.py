"""Calls of the sandbox that the tests of its gRPC face share."""

import asyncio
import json
import uuid

import grpc
import pytest

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.verification_pb2 import Grade, Verification

HANG_SECONDS = 30


def creation(run, verifier="test/length", answers=("a", "bb"), **changes):
    fields = {
        "request_id": str(uuid.uuid4()),
        "verifier": verifier,
        "payload": json.dumps({"of": run}).encode(),
        "answers": answers,
        "run": run,
    }
    return pb.CreateVerificationRequest(**(fields | changes))


async def create(stub, *arguments, **changes):
    return (await stub.CreateVerification(creation(*arguments, **changes))).verification


async def read(stub, name):
    return (await stub.GetVerification(pb.GetVerificationRequest(name=name))).verification


async def until(stub, name, condition):
    async with asyncio.timeout(HANG_SECONDS):
        while not condition(job := await read(stub, name)):
            await asyncio.sleep(0.01)
    return job


async def ended(stub, name):
    return await until(stub, name, lambda job: job.state == Verification.STATE_ENDED)


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def outcomes(job):
    return [Grade.Outcome.Name(grade.outcome).removeprefix("OUTCOME_") for grade in job.grades]
