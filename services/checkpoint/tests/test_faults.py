"""Bad requests, bad environments, and a service that is killed."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux_checkpoint.main import build
from reflux_checkpoint.settings import CheckpointSettings
from reflux_kit.errors import reason_of
from reflux_kit.server import running

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["CheckpointService"].methods]
PROPER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
}


async def raw_code(channel: grpc.aio.Channel, method: str, request: bytes) -> grpc.StatusCode:
    """Status of a call with these bytes as request."""
    call = channel.unary_unary(f"/reflux.checkpoint.v1.CheckpointService/{method}")
    try:
        await call(request, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
async def test_an_empty_request_gets_a_proper_status(address: str, method: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        code = await raw_code(channel, method, b"")
    assert code is (grpc.StatusCode.OK if method == "ListCheckpoints" else grpc.StatusCode.INVALID_ARGUMENT)


@given(st.sampled_from(METHODS), st.binary(max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_random_request_gets_a_proper_status_and_no_traceback(
    address: str, caplog: pytest.LogCaptureFixture, method: str, request: bytes
) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        assert await raw_code(channel, method, request) in PROPER | {grpc.StatusCode.OK}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@contextmanager
def service(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A real service process on a free port."""
    child = subprocess.Popen(
        [sys.executable, "-m", "reflux_checkpoint.main"],
        env={**os.environ, "REFLUX_CHECKPOINT_LISTEN": "127.0.0.1:0", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(20)


def address_of(child: subprocess.Popen[str]) -> str:
    """Where the process listens, from its log."""
    assert child.stderr is not None
    for line in child.stderr:
        if " serves gRPC on " in line:
            return line.split(" serves gRPC on ")[1].split()[0]
    raise AssertionError("the service did not start")


def taken_port() -> socket.socket:
    """A bound socket that does not listen: connecting is refused, binding fails."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


FAULTS = ["no store", "S3 away", "S3 silent", "no bucket address", "folder impossible", "port in use"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_cannot_start_says_why_in_one_line(tmp_path: Path, fault: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with taken_port() as taken:
        taken_address = f"127.0.0.1:{taken.getsockname()[1]}"
        if fault == "S3 silent":
            taken.listen()  # connections are taken up by the kernel, and nobody answers
        s3 = {
            "REFLUX_OBJECT_STORE": "s3://bucket/x",
            "REFLUX_S3_ENDPOINT": f"http://{taken_address}",
            "REFLUX_CHECKPOINT_STORE_TIMEOUT_SECONDS": "0.3",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        good = {"REFLUX_OBJECT_STORE": (tmp_path / "store").as_uri()}
        environment, word = {
            "no store": ({"REFLUX_OBJECT_STORE": "", "REFLUX_STATE_DIR": ""}, "REFLUX_OBJECT_STORE"),
            "S3 away": (s3, taken_address),
            "S3 silent": (s3, taken_address),
            "no bucket address": ({"REFLUX_OBJECT_STORE": "bucket"}, "file:///folder or s3://bucket/prefix"),
            "folder impossible": ({"REFLUX_OBJECT_STORE": (tmp_path / "file/x").as_uri()}, "Not a directory"),
            "port in use": ({**good, "REFLUX_CHECKPOINT_LISTEN": taken_address}, taken_address),
        }[fault]
        with service(environment) as child:
            _, errors = child.communicate(timeout=60)
    assert child.returncode == 2
    assert word in errors
    assert len(errors.strip().splitlines()) == 1, errors


async def test_s3_that_goes_away_is_a_typed_error_and_the_service_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    boto3 = pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="bucket")
    parts = CheckpointSettings(
        listen="127.0.0.1:0", object_store="s3://bucket/x", s3_endpoint=endpoint, drain_seconds=0, sweep_seconds=0.2
    )
    async with build(parts) as built, running(built, parts) as bound, grpc.aio.insecure_channel(bound.grpc) as channel:
        begin = pb.BeginCheckpointRequest(request_id="1", run="r", step=1).SerializeToString()
        assert await raw_code(channel, "BeginCheckpoint", begin) is grpc.StatusCode.OK
        server.stop()
        call = channel.unary_unary("/reflux.checkpoint.v1.CheckpointService/BeginCheckpoint")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(begin, timeout=40)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(caught.value) == "UNAVAILABLE"
        assert endpoint in caught.value.details()
        assert await raw_code(channel, "GetCheckpoint", b"") is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_service_killed_between_begin_and_commit_is_replaced_by_the_next(store_folder: Path, connect) -> None:
    environment = {"REFLUX_OBJECT_STORE": store_folder.as_uri()}
    with service(environment) as child:
        async with connect(address_of(child)) as writer:
            begun = await writer.begin(1)
            stored = writer.write(begun)
            child.send_signal(signal.SIGKILL)
            child.wait(20)
    with service(environment) as child:
        async with connect(address_of(child)) as writer:
            committed = await writer.commit(begun, [stored])
            assert await writer.latest() == committed
            child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


async def test_calls_without_the_stack_token_are_refused(tmp_path: Path) -> None:
    parts = CheckpointSettings(listen="127.0.0.1:0", object_store=tmp_path.as_uri(), drain_seconds=0, stack_secret="s")
    async with build(parts) as built, running(built, parts) as bound, grpc.aio.insecure_channel(bound.grpc) as channel:
        for method in METHODS:
            assert await raw_code(channel, method, b"") is grpc.StatusCode.UNAUTHENTICATED
