"""The copy of a collection: answers of our own calls reach it before or after the watch has told what came of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_cluster import until

from reflux_scheduler.backends.kubernetes.mirror import Mirror


def jobset(version: int, note: str = "", name: str = "a") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)}, "note": note}


class Server:
    """Has one object at first, and tells the changes that a test makes."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def list(self, where: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        return [jobset(5)], "5"

    async def watch(self, where: str, version: str, selector: str) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield await self.events.get()

    def tell(self, kind: str, thing: dict[str, Any]) -> None:
        self.events.put_nowait({"type": kind, "object": thing})


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def mirror(server) -> AsyncIterator[Mirror]:
    mirror = Mirror(server, "jobsets", "", lambda thing: thing)
    task = asyncio.create_task(mirror.run())
    await mirror.in_step(10)
    yield mirror
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_what_was_deleted_is_not_brought_back_by_the_answer_to_an_older_call(server, mirror):
    server.tell("MODIFIED", jobset(6))
    server.tell("DELETED", jobset(7))
    await until(lambda: not mirror.objects)
    mirror.put(jobset(6, "the answer to a patch"))
    assert mirror.objects == {}


async def test_an_answer_is_taken_in_before_the_watch_tells_it_and_an_older_one_changes_nothing(server, mirror):
    mirror.put(jobset(9, "new"))
    mirror.put(jobset(8, "old"))
    assert mirror.objects["ns/a"]["note"] == "new"
    mirror.put(jobset(10, "another", name="b"))
    assert set(mirror.objects) == {"ns/a", "ns/b"}
