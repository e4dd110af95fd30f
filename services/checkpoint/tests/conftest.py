"""A real service on a folder store, and the writer's side of a checkpoint."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import grpc
import pytest

from reflux.checkpoint.v1 import checkpoint_pb2 as messages
from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux_checkpoint.main import build
from reflux_checkpoint.settings import CheckpointSettings
from reflux_kit.server import running
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stream import TensorSource, write_tensors


@dataclass
class Writer:
    """What a learner does; every call has a deadline."""

    stub: CheckpointServiceStub
    store: ObjectStore

    async def begin(self, step: int, attempt: int = 1, run: str = "r", request_id: str = "") -> messages.Checkpoint:
        request = pb.BeginCheckpointRequest(request_id=request_id or str(uuid4()), run=run, step=step, attempt=attempt)
        return (await self.stub.BeginCheckpoint(request, timeout=20)).checkpoint

    def write(self, checkpoint: messages.Checkpoint, name: str = "model", fill: int = 1) -> messages.StoredObject:
        data = memoryview(bytes([fill]) * 4096)
        receipt = write_tensors(self.store, f"{checkpoint.prefix}/{name}", [TensorSource("w", "U8", (4096,), data)])
        return messages.StoredObject(key=receipt.key, size_bytes=receipt.size_bytes, checksum=receipt.checksum)

    async def commit(
        self, checkpoint: messages.Checkpoint, objects: list[messages.StoredObject], **cursor: int
    ) -> messages.Checkpoint:
        where = messages.LoopCursor(step=checkpoint.step, version=checkpoint.step, **cursor)
        request = pb.CommitCheckpointRequest(name=checkpoint.name, objects=objects, cursor=where)
        return (await self.stub.CommitCheckpoint(request, timeout=20)).checkpoint

    async def save(self, step: int, attempt: int = 1, run: str = "r") -> messages.Checkpoint:
        checkpoint = await self.begin(step, attempt, run)
        return await self.commit(checkpoint, [self.write(checkpoint)])

    async def latest(self, run: str = "r") -> messages.Checkpoint:
        return (await self.stub.GetLatestCheckpoint(pb.GetLatestCheckpointRequest(run=run), timeout=20)).checkpoint

    async def get(self, name: str) -> messages.Checkpoint:
        return (await self.stub.GetCheckpoint(pb.GetCheckpointRequest(name=name), timeout=20)).checkpoint

    async def scrub(self, name: str) -> pb.ScrubCheckpointResponse:
        return await self.stub.ScrubCheckpoint(pb.ScrubCheckpointRequest(name=name), timeout=20)

    async def abort(self, name: str) -> messages.Checkpoint:
        return (await self.stub.AbortCheckpoint(pb.AbortCheckpointRequest(name=name), timeout=20)).checkpoint

    async def list(self, run: str = "", **page: str | int) -> pb.ListCheckpointsResponse:
        return await self.stub.ListCheckpoints(pb.ListCheckpointsRequest(run=run, **page), timeout=20)


@pytest.fixture
def store_folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def address(store_folder: Path) -> AsyncIterator[str]:
    settings = CheckpointSettings(
        listen="127.0.0.1:0", object_store=store_folder.as_uri(), drain_seconds=0, sweep_seconds=3600
    )
    async with build(settings) as service, running(service, settings) as bound:
        yield bound.grpc


@pytest.fixture
def connect(store_folder: Path) -> Callable[[str], AbstractAsyncContextManager[Writer]]:
    @asynccontextmanager
    async def connected(address: str) -> AsyncIterator[Writer]:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Writer(CheckpointServiceStub(channel), open_store(store_folder.as_uri()))

    return connected


@pytest.fixture
async def writer(address: str, connect: Callable[[str], AbstractAsyncContextManager[Writer]]) -> AsyncIterator[Writer]:
    async with connect(address) as writer:
        yield writer
