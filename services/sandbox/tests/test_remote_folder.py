"""The contract of remote places, shown on workers that share a folder with the service."""

import asyncio
import contextlib
import os
import signal
import sys
import time

import pytest

from reflux_sandbox.execution import SessionLost
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote import worker
from reflux_sandbox.remote.choose import open_places
from reflux_sandbox.remote.folder import FolderBackend
from reflux_sandbox.remote.mailbox import Mailbox, work_key
from reflux_sandbox.remote.settings import FolderSettings, RemoteSettings
from reflux_sandbox.remote.worker import work

INFO = VerifierInfo(name="test/length", version="1", fidelity="rule", trusted=True, cost_seconds=0.1)
HANG_SECONDS = 30


class FakeNode:
    """Grades by length; `gate` holds it back."""

    def __init__(self):
        self.seen = []
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = ""

    async def grade(self, request):
        self.seen.append(request["answers"])
        self.started.set()
        await self.gate.wait()
        if self.error:
            return {"error": self.error, "message": "as told"}
        return {
            "grades": [
                {"outcome": "scored", "reward": len(a), "figures": {}, "message": ""} for a in request["answers"]
            ]
        }


@contextlib.asynccontextmanager
async def backend_of(folder, **changes):
    backend = FolderBackend(FolderSettings(folder=str(folder), **changes), {"isolation": "process"})
    await backend.start()
    yield backend
    await backend.close()


@pytest.fixture
async def place(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_BEAT_SECONDS", 0.05)
    async with backend_of(tmp_path, lost_seconds=HANG_SECONDS) as backend:
        yield backend


@contextlib.asynccontextmanager
async def worker_of(place, node):
    task = asyncio.create_task(work(place.mailbox, node))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def grade(place, *answers):
    async with place.session(INFO) as session:
        return await asyncio.wait_for(session.grade(INFO.name, "{}", list(answers)), HANG_SECONDS)


async def test_a_worker_of_the_folder_answers_like_a_child(place):
    async with worker_of(place, FakeNode()):
        first, second = await asyncio.gather(grade(place, "a", "bb"), grade(place, "ccc"))
    assert [row["reward"] for row in first["grades"]] == [1, 2]
    assert [row["reward"] for row in second["grades"]] == [3]


async def test_a_service_that_was_restarted_takes_its_job_up_again(place, tmp_path):
    node = FakeNode()
    node.gate.clear()
    async with worker_of(place, node):
        before = asyncio.create_task(grade(place, "a"))
        await node.started.wait()
        before.cancel()  # how a service stops
        with contextlib.suppress(asyncio.CancelledError):
            await before
        node.gate.set()
        async with backend_of(tmp_path) as successor:
            assert (await grade(successor, "a"))["grades"][0]["reward"] == 1
            assert (await grade(successor, "a"))["grades"][0]["reward"] == 1
    assert node.seen == [["a"]]


async def test_an_error_is_answered_once_and_the_work_can_be_tried_again(place):
    node = FakeNode()
    node.error = "crash"
    async with worker_of(place, node):
        assert (await grade(place, "a"))["error"] == "crash"
        node.error = ""
        assert "grades" in await grade(place, "a")
    assert len(node.seen) == 2


async def test_a_dead_worker_is_noticed_and_another_one_does_its_work(place, tmp_path):
    key = work_key(INFO.name, "1", "{}", ["a"])
    async with backend_of(tmp_path, lost_seconds=0.3) as impatient, impatient.session(INFO) as session:
        grading = asyncio.create_task(session.grade(INFO.name, "{}", ["a"]))
        while place.mailbox.take(key) is None:  # a worker that takes the job and dies
            await asyncio.sleep(0.01)
        with pytest.raises(SessionLost, match="sign of life"):
            await asyncio.wait_for(grading, HANG_SECONDS)
    async with worker_of(place, FakeNode()):
        assert "grades" in await grade(place, "a")


async def test_leaving_with_an_error_stops_the_work_and_leaves_nothing(place):
    node = FakeNode()
    node.gate.clear()
    async with worker_of(place, node):
        with contextlib.suppress(TimeoutError):
            async with place.session(INFO) as session:
                grading = asyncio.create_task(session.grade(INFO.name, "{}", ["a"]))
                await node.started.wait()
                grading.cancel()
                await asyncio.wait([grading])
                raise TimeoutError
        await _until(lambda: not list((place.mailbox.folder / "taken").iterdir()))
    assert not list((place.mailbox.folder / "results").iterdir())


async def test_a_worker_that_is_told_to_stop_offers_its_job_again(place):
    node = FakeNode()
    node.gate.clear()
    async with worker_of(place, node):
        waiting = asyncio.create_task(grade(place, "a"))
        await node.started.wait()
    async with worker_of(place, FakeNode()):
        assert "grades" in await waiting


async def test_a_torn_or_foreign_result_is_a_lost_session_and_not_a_grade(place):
    key = work_key(INFO.name, "1", "{}", ["a"])
    for text in ("{", "[]", "\xff"):
        (place.mailbox.folder / "results" / f"{key}.json").write_text(text, encoding="latin-1")
        with pytest.raises(SessionLost, match="failed"):
            await grade(place, "a")


def test_only_one_of_many_workers_gets_a_job(tmp_path):
    mailbox = Mailbox(tmp_path)
    keys = [work_key("v", "1", "{}", [str(n)]) for n in range(5)]
    for key in keys:
        mailbox.put(key, {"key": key})
    taken = [mailbox.take() for _ in range(6)]
    assert sorted(each[0] for each in taken if each) == sorted(keys)
    assert taken[5] is None
    assert mailbox.take(keys[0]) is None
    for wrong in ("../x", "", "A" * 32):
        with pytest.raises(ValueError, match="key"):
            mailbox.finish(wrong, {})


def test_old_files_are_swept_and_fresh_ones_stay(tmp_path):
    mailbox = Mailbox(tmp_path)
    old, fresh = (work_key("v", "1", "{}", [name]) for name in ("old", "fresh"))
    for key in (old, fresh):
        mailbox.finish(key, {"grades": []})
    os.utime(tmp_path / "results" / f"{old}.json", (time.time() - 100, time.time() - 100))
    mailbox.sweep(50)
    assert mailbox.result(old) is None
    assert mailbox.result(fresh) == {"grades": []}


async def test_routes_choose_the_place_by_verifier_and_by_fidelity(tmp_path):
    settings = RemoteSettings(
        routes={"full": "folder", "test/length": "folder"}, folder=FolderSettings(folder=str(tmp_path))
    )
    full = VerifierInfo(name="test/full", version="1", fidelity="full", trusted=False, cost_seconds=1)
    rule = VerifierInfo(name="test/rule", version="1", fidelity="rule", trusted=False, cost_seconds=1)
    async with open_places(settings, {}) as places:
        assert places.route(full) is not None
        assert places.route(INFO) is not None
        assert places.route(rule) is None
    with pytest.raises(ValueError, match=r"remote\.slurm"):
        RemoteSettings(routes={"full": "slurm"})


@pytest.mark.slow
async def test_the_worker_program_grades_in_children_of_its_own(tmp_path, isolation_options):
    options = isolation_options()
    node = {"isolation": "process", "graders": options["graders"], "import_folders": list(options["import_folders"])}
    backend = FolderBackend(FolderSettings(folder=str(tmp_path)), node)
    await backend.start()
    command = [sys.executable, "-m", "reflux_sandbox.remote.worker", "--folder", str(tmp_path)]
    program = await asyncio.create_subprocess_exec(*command)
    try:
        answer = await grade(backend, "a", "bb")
        assert [row["reward"] for row in answer["grades"]] == [1, 2]
        program.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(program.wait(), HANG_SECONDS) == 0
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
        await backend.close()


async def _until(condition):
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
