"""Pools, deadlines and deaths of the prefork tier."""

import asyncio
import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

from reflux_sandbox.execution import CodeRequest, GradeSession, SessionLost, run_code
from reflux_sandbox.isolation.base import ChildLimits, IsolationUnavailable
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.isolation.process import ProcessIsolation

FULL = 4
"""Two idle children for each of two templates: one with the verifiers, one without for code."""


@pytest.fixture
async def prefork(namespaces, isolation_options):
    isolation = PreforkIsolation(**isolation_options())
    await isolation.start()
    yield isolation
    await isolation.close()


def code(text, seconds=5.0):
    return CodeRequest(code=text, wall_seconds=seconds, memory_bytes=128 << 20)


def session(isolation, profile="grade"):
    return GradeSession(isolation, profile, 256 << 20, 60, family="test")


def descendants(pid):
    """(state, pid) of every process below `pid`."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            found += [(state, int(child)), *descendants(child)]
        except FileNotFoundError:
            continue
    return found


async def until(condition, what):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"not within 10 s: {what}")


def zombies():
    return {pid for state, pid in descendants(os.getpid()) if state == "Z"}


async def leaks_after_timeouts(prefork, count):
    async def one():
        return await run_code(
            await prefork.acquire(), code("import os; os.fork(); os.setsid(); os.fork()\nwhile True: pass", 0.05)
        )

    await until(lambda: prefork.idle_children == FULL, "a full pool")
    gc.collect()
    before = (len(list(Path("/proc/self/fd").iterdir())), len(descendants(os.getpid())))
    old = zombies()  # of other tests in this process, if any
    for _ in range(count // 4):
        results = await asyncio.gather(*(one() for _ in range(4)))
        assert {result.status for result in results} == {"timeout"}
    await until(lambda: prefork.idle_children == FULL, "a full pool")
    await until(lambda: len(descendants(os.getpid())) == before[1], "no process left over")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before[0], "what earlier tests have left may close meanwhile"
    await until(lambda: zombies() <= old, "no zombie left over")


async def test_timeouts_leave_no_zombie_process_or_descriptor(prefork):
    await leaks_after_timeouts(prefork, 48)


@pytest.mark.slow
async def test_500_timeouts_leave_no_zombie_process_or_descriptor(prefork):
    await leaks_after_timeouts(prefork, 500)


async def test_disk_of_ended_children_is_given_back(prefork):
    for _ in range(12):  # more than the memory group of one cell holds
        result = await run_code(await prefork.acquire(), code("open('f', 'wb').write(bytes(7 << 20))"))
        assert result.status == "ok"


async def test_a_session_grades_many_jobs_in_one_child(prefork):
    async with session(prefork) as grading:
        answers = [await grading.grade("test/length", "{}", ["a" * count]) for count in (1, 2, 3)]
    rows = [answer["grades"][0] for answer in answers]
    assert [row["reward"] for row in rows] == [1.0, 2.0, 3.0]
    assert {row["figures"]["pid"] for row in rows} == {2.0}


async def test_a_hanging_verifier_dies_and_its_neighbour_answers(prefork):
    async with session(prefork) as neighbour:
        with pytest.raises(TimeoutError):
            async with session(prefork) as hanging, asyncio.timeout(0.3):
                await hanging.grade("test/hang", "{}", ["hang"])
        answer = await neighbour.grade("test/length", "{}", ["abc"])
    assert answer["grades"][0]["reward"] == 3.0


async def test_a_dead_verifier_is_a_lost_session_with_its_cause(prefork):
    async with session(prefork) as grading:
        with pytest.raises(SessionLost, match="ended with -6"):
            await grading.grade("test/crash", "{}", ["segfault"])


async def test_an_exception_of_a_verifier_is_an_answer(prefork):
    async with session(prefork) as grading:
        answer = await grading.grade("test/crash", "{}", ["x"])
        assert answer == {"error": "crash", "message": "RuntimeError: a bug of the verifier"}
        assert (await grading.grade("test/length", "{}", ["x"]))["grades"][0]["reward"] == 1.0


async def test_only_native_verifiers_may_start_programs(prefork):
    if not Path("/usr/bin/python3").exists():
        pytest.skip("needs /usr/bin/python3")
    async with session(prefork, "native") as native:
        assert (await native.grade("test/native", "{}", ["abcd"]))["grades"][0]["reward"] == 4.0
    async with session(prefork) as plain:
        answer = await plain.grade("test/exec", "{}", ["abcd"])
    assert answer["error"] == "crash"
    assert "PermissionError" in answer["message"]


async def test_a_killed_warm_parent_takes_its_children_along_and_is_replaced(prefork):
    child = await prefork.acquire()
    warm = descendants(prefork.warm_parent_pid())[0][1]
    os.kill(warm, signal.SIGKILL)
    await asyncio.wait_for(child.until_dead(), 5)
    await child.end()
    result = await asyncio.wait_for(_run_one(prefork, "print('back')"), 20)
    assert result.stdout == b"back\n"


async def _run_one(prefork, text):
    return await run_code(await prefork.acquire(), code(text))


async def test_a_cancelled_caller_leaves_no_child(prefork):
    await until(lambda: prefork.idle_children == FULL, "a full pool")
    task = asyncio.create_task(_run_one(prefork, "import time; time.sleep(60)"))
    await until(lambda: prefork.busy_children == 1 and prefork.idle_children == FULL, "a busy child")
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: prefork.busy_children == 0, "no busy child")


async def test_closing_leaves_no_process_folder_or_cgroup(namespaces, isolation_options):
    isolation = PreforkIsolation(**isolation_options())
    await isolation.start()
    await until(lambda: isolation.idle_children == FULL, "a full pool")
    launcher = isolation.warm_parent_pid()
    tree = {launcher, *(pid for _, pid in descendants(launcher))}
    groups = [Path(path).parent for path in isolation.cgroup_procs(0)]
    assert len(tree) > 3
    await isolation.close()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tree), "no process left")
    assert not any(group.exists() for group in groups)


async def test_children_are_handed_out_once(prefork):
    results = [await _run_one(prefork, "open('/tmp/mark', 'x').close(); print('first')") for _ in range(6)]
    assert {result.stdout for result in results} == {b"first\n"}


async def test_without_verifiers_the_tier_says_so(namespaces, isolation_options):
    isolation = PreforkIsolation(**isolation_options(graders="", limits=ChildLimits(), idle_target=1, most_children=1))
    await isolation.start()
    try:
        assert isolation.verifiers == []
        assert any("no verifiers" in reason for reason in isolation.reasons)
    finally:
        await isolation.close()


async def test_a_user_namespace_replaces_root(namespaces, isolation_options):
    options = isolation_options(in_user_namespace=True, idle_target=1, most_children=2)
    isolation = PreforkIsolation(**options)
    try:
        await isolation.start()
    except IsolationUnavailable as error:
        pytest.skip(f"needs user namespaces: {error}")
    text = """
import os
print(os.getuid(), os.getpid(), os.listdir('/box'), flush=True)
for path in ('/probe', '/usr/probe'):
    try:
        open(path, 'w')
    except OSError as error:
        print(error.strerror, flush=True)
while True: os.fork()
"""
    try:
        result = await run_code(await isolation.acquire(), code(text))
        after = await run_code(
            await isolation.acquire(), code("import os; print(os.wait() if os.fork() else os._exit(0))")
        )
    finally:
        await isolation.close()
    assert result.stdout.decode().splitlines() == ["65534 2 []"] + ["Read-only file system"] * 2, result
    assert (result.status, after.status) == ("pids", "ok")


async def test_the_warm_parent_has_one_thread_and_no_secret(prefork):
    warm = descendants(prefork.warm_parent_pid())[0][1]
    assert "Threads:\t1\n" in Path(f"/proc/{warm}/status").read_text()
    assert not any("threads" in reason for reason in prefork.reasons)


async def test_modules_that_nobody_imported_before_can_be_read(prefork):
    result = await _run_one(prefork, "import sqlite3, xml.dom.minidom, wave, redis; print('read')")
    assert result.stdout == b"read\n", result.stderr


async def test_mount_points_of_killed_services_are_removed(namespaces, isolation_options, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale = tmp_path / "reflux-root-999999999-abc"
    stale.mkdir()
    isolation = PreforkIsolation(**isolation_options(graders="", idle_target=1, most_children=1))
    await isolation.start()
    assert not stale.exists()
    await isolation.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tier", [PreforkIsolation, ProcessIsolation])
async def test_only_the_tasks_that_are_wanted_are_loaded(tier, namespaces, isolation_options):
    isolation = tier(**isolation_options(only_families=("nothing-of-that-name",)))
    await isolation.start()
    try:
        assert isolation.verifiers == []
        assert any("'nothing-of-that-name' is installed" in reason for reason in isolation.reasons)
    finally:
        await isolation.close()
