"""Torn checkpoints: whatever dies, whenever, the latest checkpoint is a whole one."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from reflux.checkpoint.v1 import checkpoint_pb2 as messages
from reflux_checkpoint.catalog import Catalog, State
from reflux_checkpoint.manifest import CheckpointId, Cursor, StoredObject, make_id
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.retention import RetentionPolicy
from reflux_checkpoint.sweeper import Sweeper, SweepPolicy
from reflux_storage.stores.folder import FolderStore

WRITER = """
import os, signal, sys
from pathlib import Path
import grpc
from reflux.checkpoint.v1 import checkpoint_pb2 as messages
from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux_storage.stores.folder import FolderStore
from reflux_storage.stream import StreamOptions, TensorSource, write_tensors

address, folder, point = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def reached(here):
    if here == point:
        os.kill(os.getpid(), signal.SIGKILL)

class Store(FolderStore):
    def put_part(self, upload, number, data):
        if number == 2:
            reached("inside an object")
        return super().put_part(upload, number, data)

stub = CheckpointServiceStub(grpc.insecure_channel(address))
begun = stub.BeginCheckpoint(pb.BeginCheckpointRequest(request_id="2", run="r", step=2, attempt=1), timeout=20)
reached("before the objects")
data = memoryview(bytes(11 << 20))
stored = []
for name in ("model", "optimizer"):
    source = TensorSource("w", "U8", (len(data),), data)
    options = StreamOptions(part_bytes=5 << 20, connections=1)
    receipt = write_tensors(Store(folder), f"{begun.prefix}/{name}", [source], options)
    stored.append(messages.StoredObject(key=receipt.key, size_bytes=receipt.size_bytes, checksum=receipt.checksum))
    reached(f"after {name}")
request = pb.CommitCheckpointRequest(name=begun.checkpoint.name, objects=stored, cursor=messages.LoopCursor(step=2))
stub.CommitCheckpoint(request, timeout=20)
reached("after the commit")
"""

POINTS = ["before the objects", "inside an object", "after model", "after optimizer", "after the commit"]


@pytest.mark.parametrize("point", POINTS)
async def test_a_writer_killed_anywhere_leaves_a_whole_latest_checkpoint(
    writer, address: str, store_folder: Path, point: str
) -> None:
    first = await writer.save(1)
    command = [sys.executable, "-c", WRITER, address, str(store_folder), point]
    killed = await asyncio.to_thread(subprocess.run, command, timeout=60, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    latest = await writer.latest()
    assert latest.step == (2 if point == "after the commit" else 1)
    assert not (await writer.scrub(latest.name)).damaged_keys
    _sweep(writer.store, after_seconds=7200)
    kept = {latest.name, first.name}
    assert {
        "checkpoints/" + "/".join(info.key.split("/")[2:4]) for info in writer.store.list("checkpoints/data/")
    } == kept
    assert list(writer.store.list_uploads("")) == []
    assert list(writer.store.list("checkpoints/begun/")) == []


def _sweep(store: FolderStore, after_seconds: float = 0.0) -> None:
    """One sweep of a service whose clock is `after_seconds` ahead."""

    def clock() -> float:
        return time.time() + after_seconds

    catalog = Catalog(store)
    protocol = CommitProtocol(store, catalog, clock)
    policy = SweepPolicy(lease_seconds=3600, scrub_every_seconds=0, retention=RetentionPolicy(keep_last=3))
    Sweeper(store, catalog, protocol, policy, clock).sweep()


COMMITTER = """
import os, signal, sys
from pathlib import Path
from reflux_checkpoint.catalog import Catalog
from reflux_checkpoint.manifest import Cursor, StoredObject, make_id
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.retention import RetentionPolicy
from reflux_checkpoint.sweeper import Sweeper, SweepPolicy
from reflux_storage.stores.folder import FolderStore

class Store(FolderStore):
    # Dies right before or right after its n-th change.
    countdown = 0

def mortal(name):
    inner = getattr(FolderStore, name)
    def change(self, *args):
        for act in (lambda: None, lambda: inner(self, *args)):
            result = act()
            Store.countdown -= 1
            if Store.countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return result
    return change

for name in ("put_create_only", "put_if_match", "delete", "abort"):
    setattr(Store, name, mortal(name))

def work(job, root):
    store = Store(root)
    catalog = Catalog(store)
    protocol = CommitProtocol(store, catalog)
    id = make_id("r", 1, 2, "second")
    if job == "commit":
        protocol.begin(id)
        stored = StoredObject(f"{id.data_prefix}/model", 3, "0" * 32)
        protocol.commit(id, (stored,), Cursor(2, 0, 2, 0, 0, 0, (), 0, ""))
    elif job == "abort":
        protocol.abort(id)
    else:
        policy = SweepPolicy(lease_seconds=3600, scrub_every_seconds=0, retention=RetentionPolicy(keep_last=1))
        Sweeper(store, catalog, protocol, policy).sweep()

for point, root in enumerate(sys.argv[2:], 1):
    child = os.fork()
    if child == 0:
        Store.countdown = point
        work(sys.argv[1], Path(root))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
CURSOR = Cursor(2, 0, 2, 0, 0, 0, (), 0, "")


def _saved(store: FolderStore, step: int, request: str, commit: bool = True) -> None:
    protocol = CommitProtocol(store, Catalog(store))
    id = make_id("r", 1, step, request)
    protocol.begin(id)
    store.put_create_only(f"{id.data_prefix}/model", b"abc")
    if commit:
        protocol.commit(id, (StoredObject(f"{id.data_prefix}/model", 3, "0" * 32),), CURSOR)


@pytest.mark.parametrize("job", ["commit", "abort", "retention"])
def test_a_service_killed_before_or_after_any_change_of_the_store_can_be_asked_again(tmp_path: Path, job: str) -> None:
    """The next service finds a whole latest checkpoint, and the same call again ends as if nothing had happened."""
    second = make_id("r", 1, 2, "second")
    roots = [tmp_path / str(number) for number in range(20)]
    for root in roots:
        store = FolderStore(root)
        _saved(store, 1, "first")
        if job == "commit":
            store.put_create_only(f"{second.data_prefix}/model", b"abc")
        else:
            _saved(store, 2, "second", commit=job == "retention")
    command = [sys.executable, "-c", COMMITTER, job, *map(str, roots)]
    ended = subprocess.run(command, timeout=100, capture_output=True, check=True, text=True)
    codes = [int(line) for line in ended.stdout.split()]
    deaths = codes.index(0)
    assert deaths >= 4
    assert codes == [-signal.SIGKILL] * deaths + [0] * (len(roots) - deaths)
    for root in roots[: deaths + 1]:
        _check_next_service(FolderStore(root), job, second)


def _check_next_service(store: FolderStore, job: str, second: CheckpointId) -> None:
    catalog = Catalog(store)
    protocol = CommitProtocol(store, catalog)
    latest = catalog.latest("r")
    assert latest is not None
    assert latest.state is State.COMMITTED
    if job == "retention":
        assert latest.id.step == 2
        _sweep(store, after_seconds=7200)
        kept = {record.id.key for record in catalog.newest_first("r")}
        assert {record.state for record in catalog.newest_first("r")} == {State.COMMITTED}
        assert {info.key.split("/")[3] for info in store.list("checkpoints/data/")} == kept
    elif job == "abort":
        assert protocol.abort(second).state is State.ABORTED
        assert list(store.list(second.data_prefix)) == []
    else:
        stored = (StoredObject(f"{second.data_prefix}/model", 3, "0" * 32),)
        protocol.begin(second)
        assert protocol.commit(second, stored, CURSOR).state is State.COMMITTED
        assert catalog.latest("r") == catalog.get(second)


async def test_a_corrupt_object_is_found_by_the_scrub_and_skipped_from_then_on(writer, store_folder: Path) -> None:
    older = await writer.save(1)
    newer = await writer.save(2)
    path = store_folder / newer.objects[0].key
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert (await writer.latest()).name == newer.name, "a flipped bit is not visible without reading"
    found = await writer.scrub(newer.name)
    assert list(found.damaged_keys) == [newer.objects[0].key]
    assert found.checkpoint.state == messages.Checkpoint.STATE_DAMAGED
    assert (await writer.latest()).name == older.name
    assert [item.state for item in (await writer.list("r")).checkpoints] == [
        messages.Checkpoint.STATE_DAMAGED,
        messages.Checkpoint.STATE_COMMITTED,
    ]
    content[1000] ^= 1
    path.write_bytes(content)
    assert not (await writer.scrub(newer.name)).damaged_keys
    assert (await writer.latest()).name == newer.name


@pytest.mark.parametrize(
    "harm", ["object gone", "object truncated", "manifest torn", "manifest gone", "manifest of another"]
)
async def test_a_harmed_checkpoint_is_never_the_latest(writer, store_folder: Path, harm: str) -> None:
    older = await writer.save(1)
    newer = await writer.save(2)
    manifests = sorted((store_folder / "checkpoints/manifests/r").iterdir())
    if harm == "object gone":
        (store_folder / newer.objects[0].key).unlink()
    elif harm == "object truncated":
        os.truncate(store_folder / newer.objects[0].key, 100)
    elif harm == "manifest torn":
        os.truncate(manifests[-1], 100)
    elif harm == "manifest gone":
        manifests[-1].unlink()
    else:
        manifests[-1].write_bytes(manifests[0].read_bytes())
    assert (await writer.latest()).name == older.name
    state = (await writer.get(newer.name)).state
    assert state == (messages.Checkpoint.STATE_OPEN if harm == "manifest gone" else messages.Checkpoint.STATE_DAMAGED)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await writer.abort(newer.name) if harm != "manifest gone" else await writer.latest("none")
    assert caught.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
    _sweep(writer.store)
    assert (await writer.latest()).name == older.name


def test_a_stale_manifest_that_slips_in_is_not_the_latest(tmp_path: Path) -> None:
    """Even without any check at commit: the order of attempts decides."""
    store = FolderStore(tmp_path)
    catalog = Catalog(store)
    protocol = CommitProtocol(store, catalog)
    stale = make_id("r", 1, 30, "zombie")
    protocol.begin(stale)
    store.put_create_only(f"{stale.data_prefix}/model", b"abc")
    fresh = make_id("r", 2, 25, "fresh")
    protocol.begin(fresh)
    store.put_create_only(f"{fresh.data_prefix}/model", b"abc")
    protocol.commit(fresh, (StoredObject(f"{fresh.data_prefix}/model", 3, "0" * 32),), CURSOR)
    store.delete("checkpoints/fences/r")  # as if the zombie had passed the check before
    protocol.commit(stale, (StoredObject(f"{stale.data_prefix}/model", 3, "0" * 32),), CURSOR)
    latest = catalog.latest("r")
    assert latest is not None
    assert latest.id == fresh
