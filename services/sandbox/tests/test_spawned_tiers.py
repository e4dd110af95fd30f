"""bwrap and gvisor behind the same interface as prefork: work, endings, kills, nothing left behind."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from sandbox_attacks import ATTACKS

from reflux_sandbox.execution import CodeRequest, GradeSession, SessionLost, run_code
from reflux_sandbox.isolation.base import IsolationUnavailable
from reflux_sandbox.isolation.choose import TIERS
from reflux_sandbox.isolation.gvisor import GvisorIsolation
from reflux_sandbox.sessions.caps import SessionCaps
from reflux_sandbox.sessions.registry import Sessions
from reflux_sandbox.sessions.session import SessionLimits


@pytest.fixture(params=["bwrap", pytest.param("gvisor", marks=pytest.mark.slow)])
async def isolation(request, namespaces, isolation_options, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tier = TIERS[request.param](**isolation_options(idle_target=1, most_children=4))
    try:
        tier.check()
    except IsolationUnavailable as error:
        pytest.skip(f"tier {request.param}: {error}")
    await tier.start()
    yield tier
    await tier.close()
    assert list(tmp_path.iterdir()) == []


def descendants(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [below for child in children for below in (int(child), *descendants(child))]


async def run(isolation, code, seconds=30.0):
    return await run_code(
        await isolation.acquire(), CodeRequest(code=code, wall_seconds=seconds, memory_bytes=128 << 20)
    )


async def test_work_is_done_and_its_end_is_told(isolation):
    done = await run(isolation, "import os; print(os.getuid() != 0, os.listdir('/box'), os.path.exists('/var/log'))")
    assert (done.status, done.stdout) == ("ok", b"True [] False\n"), done
    assert (await run(isolation, "raise SystemExit(3)")).exit_code == 3
    assert (await run(isolation, "import os; os.fstat(0); os.fstat(3)")).stderr.strip().endswith(b"descriptor")
    assert (await run(isolation, ATTACKS["fake verdict on every descriptor"].code)).exit_code == 3
    assert (await run(isolation, "open('f', 'wb').write(bytes(9 << 20))")).status == "disk"
    assert (await run(isolation, "import os; os.abort()")).exit_code == -6
    async with GradeSession(isolation, "grade", 256 << 20, 60, family="test") as session:
        assert (await session.grade("test/length", "{}", ["abc"]))["grades"][0]["reward"] == 3.0
        with pytest.raises(SessionLost, match="ended with -6"):
            await session.grade("test/crash", "{}", ["segfault"])


async def test_a_timeout_leaves_no_process_of_the_child(isolation):
    code = "import os, time\nfor _ in range(2):\n    if os.fork(): break\n    os.setsid()\nwhile True: time.sleep(1)"
    child = await isolation.acquire()
    request = CodeRequest(code=code, wall_seconds=1.0, memory_bytes=128 << 20)
    work = asyncio.create_task(run_code(child, request))
    tree = {child.number}
    while not work.done():
        tree |= set(descendants(child.number))
        await asyncio.sleep(0.05)
    assert (await work).status == "timeout"
    assert len(tree) > 2
    for _ in range(3000):
        if not any(Path(f"/proc/{pid}").exists() for pid in tree):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"left: {[pid for pid in tree if Path(f'/proc/{pid}').exists()]}")


async def test_sessions_work_in_this_tier(isolation):
    limits = SessionLimits(idle_seconds=60.0, ttl_seconds=60.0, memory_bytes=128 << 20)
    async with Sessions(isolation, SessionCaps(most=1, most_per_run=1)) as sessions:
        session = await sessions.create("1", "run", limits)
        assert (await session.exec("x = 20", 30.0)).status == "ok"
        assert (await session.exec("x + 1", 30.0)).stdout == b"21\n"
        assert await session.write("a/b", b"data", append=False) == 4
        assert await session.read("a/b", 1, 2) == (b"at", 4)


async def test_a_tier_whose_program_is_missing_says_what_to_install(isolation_options, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for name, package in (("bwrap", "bubblewrap"), ("gvisor", "runsc")):
        with pytest.raises(IsolationUnavailable, match=f"Debian package {package}"):
            await TIERS[name](**isolation_options()).start()


def test_gvisor_gives_its_group_room_for_itself(isolation_options):
    tier = GvisorIsolation(**isolation_options())
    assert tier.cells.limits.processes > tier.limits.processes
    assert tier.cells.limits.memory_bytes > tier.limits.memory_bytes
