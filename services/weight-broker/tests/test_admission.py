"""What keeps a replica from pulling at all: a path below its floor, and handles that are not of its run."""

import asyncio
import logging

import numpy as np
import pytest
from test_clients import HANG_SECONDS, Stack, publish, stack, weights

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux_transfer.client.publisher import PublishAborted
from reflux_transfer.client.reporting import reporting
from reflux_transfer.client.wire import scope_of
from reflux_transfer.layout import Layout
from reflux_transfer.probe.choice import probe
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.settings import TransferSettings

__all__ = ["stack"]

JUDGED = Layout.from_shapes({"w": ([6, 1 << 18], "float32")})
"""6 MiB: enough for a rate to say something."""

SECRET = "a secret of the stack, long enough"


async def listed(stack: Stack, process: str, rows: int) -> list[pb.TransferPath]:
    """What the broker knows of a process, as soon as that is so many rows."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            answer = await stack.stub.ListPaths(pb.ListPathsRequest(), timeout=5)
            for report in answer.processes:
                if report.process == process and len(report.paths) == rows:
                    return list(report.paths)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["swap", "in_place"])
async def test_a_path_below_its_floor_aborts_the_version_and_is_listed(stack: Stack, mode: str) -> None:
    paths = PathBook(TransferSettings(floor_gb_per_second=1e6))
    async with reporting(stack.channel, "replicas/a", None, paths):
        stack.replica("a", mode=mode, layout=JUDGED, paths=paths)
        text = r"replica a: PathTooSlow: the path to pid \d+ .* by shm moves .* GB/s, its floor is 1000000\.000 GB/s"
        with pytest.raises(PublishAborted, match=text):
            await publish(stack.publisher(layout=JUDGED), 1, 1, weights(1, JUDGED), min_replicas=1)
        (row,) = await listed(stack, "replicas/a", 1)
    assert (row.transport, row.chosen) == ("shm", False)
    assert 0 < row.bytes_per_second < 1e15
    assert "pid" in row.peer
    assert "below its floor of 1000000.000 GB/s" in row.reason


async def test_a_good_path_is_tested_before_the_first_version_only(stack: Stack) -> None:
    paths, tests = PathBook(TransferSettings(floor_gb_per_second=1e-6)), []
    async with reporting(stack.channel, "replicas/a", None, paths):
        told = paths.changed
        paths.changed = lambda: (tests.append(1), told())[1]
        replicas = [stack.replica(name, layout=JUDGED, paths=paths) for name in "ab"]
        publisher = stack.publisher(layout=JUDGED)
        for version in (1, 2, 3):
            await publish(publisher, version, version, weights(version, JUDGED), min_replicas=2)
            for replica in replicas:
                assert np.array_equal((await replica.serves(version))["w"], weights(version, JUDGED)["w"].reshape(-1))
        (row,) = await listed(stack, "replicas/a", 1)
    assert row.chosen
    # Both may have begun before either had measured.
    assert 1 <= len(tests) <= 2


async def test_the_self_test_of_a_process_is_listed_with_what_it_chose(stack: Stack) -> None:
    choice = await asyncio.to_thread(probe, TransferSettings(), "shm")
    async with reporting(stack.channel, "learners/m", choice):
        rows = await listed(stack, "learners/m", len(choice.statuses))
    assert [row.transport for row in rows if row.chosen] == ["shm"]
    (chosen,) = (row for row in rows if row.chosen)
    assert chosen.reason.startswith("configured")
    assert chosen.bytes_per_second > 0


async def test_replicas_with_the_key_of_the_run_read_from_publisher_and_replica(stack: Stack) -> None:
    scope = scope_of("m", SECRET)
    publisher = stack.publisher(secret=SECRET)
    first = stack.replica("a", scope=scope)
    await publish(publisher, 1, 1, min_replicas=1)
    await first.serves(1)
    publisher._rank.arenas.close()
    assert np.array_equal((await stack.replica("b", scope=scope).serves(1))["w"], weights(1)["w"].reshape(-1))
    assert (await stack.states())["b"].source == "a"


@pytest.mark.parametrize("signed", ["", "another secret"])
async def test_handles_that_are_not_signed_with_the_key_are_refused(
    stack: Stack, signed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scope = scope_of("m", SECRET)
    stack.replica("a", scope=scope)
    text = "replica a: WrongHandle: the handle claims run 'm' and is not signed with that run's key"
    with pytest.raises(PublishAborted, match=text):
        await publish(stack.publisher(secret=signed), 1, 1, min_replicas=1)
    assert "WrongHandle" in caplog.text
    for hidden in (SECRET, scope.key.hex(), repr(scope.key)):
        assert hidden not in caplog.text
        assert hidden not in repr(scope)


async def test_handles_of_another_run_are_refused(stack: Stack) -> None:
    stack.replica("a", scope=scope_of("other", SECRET))
    with pytest.raises(PublishAborted, match="WrongHandle: the handle belongs to run 'm', this process to run 'other'"):
        await publish(stack.publisher(secret=SECRET), 1, 1, min_replicas=1)


def test_each_run_has_a_key_of_its_own_and_adapters_that_of_their_run() -> None:
    assert scope_of("m/adapters/x", SECRET) == scope_of("m", SECRET)
    assert scope_of("n", SECRET).key != scope_of("m", SECRET).key != scope_of("m", "another secret").key
    assert scope_of("m").key == b""
