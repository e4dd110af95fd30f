"""Members under an agent's table, with real keepers and processes."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from reflux_scheduler.agent.keeper import parents
from reflux_scheduler.agent.members import MemberTable, tree_rss_bytes
from reflux_scheduler.agent.orders import RoleOrder
from reflux_scheduler.agent.supervisor import Household, devices_of

HANG_SECONDS = 60


def order(script: str, rank: int = 0, **fields) -> RoleOrder:
    return RoleOrder(f"j/role/{rank}", "jobs/j", "role", rank, 1, ("python", "-c", script), **fields)


@pytest.fixture
async def members(tmp_path):
    table = MemberTable(Household("n1", dict(os.environ), tmp_path, log_limit_bytes=1 << 16))
    yield table
    await table.close()


async def ended(members: MemberTable, role_id: str = "j/role/0"):
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            (report,) = [report for report in members.reports() if report.role_id == role_id]
            if report.state in ("succeeded", "failed", "stopped"):
                return report
            members.changed.clear()
            await members.changed.wait()


async def test_output_is_kept_up_to_a_limit_in_two_files(members, tmp_path):
    await members.start(order("for n in range(30000): print('line', n)"))
    report = await ended(members)
    assert report.state == "succeeded"
    log = Path(report.log_path)
    assert log == tmp_path / "logs" / "j" / "role-0.log"
    assert log.read_text().endswith("line 29999\n")
    sizes = [path.stat().st_size for path in log.parent.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 1 << 16


async def test_a_start_is_done_once_until_the_member_is_stopped(members):
    first = await members.start(order("import time; time.sleep(600)"))
    again = await members.start(order("import time; time.sleep(600)"))
    assert first.pid == again.pid
    stopped = await members.stop("j/role/0", None, "enough")
    assert (stopped.state, stopped.message, stopped.exit_code) == ("stopped", "enough", -15)
    anew = await members.start(order("import time; time.sleep(600)"))
    assert anew.pid != first.pid
    assert anew.revision > stopped.revision


async def test_a_member_that_ignores_sigterm_is_killed_after_its_grace(members, tmp_path):
    script = (
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    report = await members.start(order(script, stop_grace_seconds=0.3))
    async with asyncio.timeout(HANG_SECONDS):
        while "deaf" not in Path(report.log_path).read_text():
            await asyncio.sleep(0.02)
    began = time.monotonic()
    stopped = await members.stop("j/role/0", None, "enough")
    assert stopped.exit_code == -9
    assert time.monotonic() - began >= 0.3


async def test_a_member_can_be_told_to_stop_without_waiting_for_its_end(members):
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    report = await members.start(order(script, stop_grace_seconds=0.3))
    async with asyncio.timeout(HANG_SECONDS):
        while "deaf" not in Path(report.log_path).read_text():
            await asyncio.sleep(0.02)
    told = await members.stop("j/role/0", None, "enough", wait=False)
    assert told.state == "running"
    # A second request waits, and does not prolong the grace.
    assert (await members.stop("j/role/0", 600.0, "enough")).exit_code == -9


async def test_a_member_may_take_its_time_within_the_grace(members):
    script = (
        "import signal, sys, time; signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0))); "
        "print('ready', flush=True); time.sleep(600)"
    )
    report = await members.start(order(script))
    async with asyncio.timeout(HANG_SECONDS):
        while "ready" not in Path(report.log_path).read_text():
            await asyncio.sleep(0.02)
    stopped = await members.stop("j/role/0", None, "enough")
    assert (stopped.state, stopped.exit_code) == ("stopped", 0)
    assert Path(report.log_path).read_text().endswith("saved\n")


async def test_memory_of_the_whole_tree_is_measured(members):
    script = (
        "import subprocess, sys; block = b'x' * (32 << 20); "
        "child = subprocess.Popen([sys.executable, '-c', "
        "\"block = b'x' * (32 << 20); print('full', flush=True); import time; time.sleep(600)\"]); child.wait()"
    )
    report = await members.start(order(script))
    async with asyncio.timeout(HANG_SECONDS):
        while "full" not in Path(report.log_path).read_text():
            await asyncio.sleep(0.02)
    (measured,) = await members.measured()
    assert measured.rss_bytes > 64 << 20
    assert tree_rss_bytes([2**22 + 1]) == {2**22 + 1: 0}


async def test_a_stop_during_the_pause_before_a_restart_starts_nothing(members):
    await members.start(order("raise SystemExit(3)", max_restarts=9))
    async with asyncio.timeout(HANG_SECONDS):
        while members.reports()[0].restarts < 3:
            members.changed.clear()
            await members.changed.wait()
    report = await members.stop("j/role/0", None, "enough")
    assert (report.state, report.pid) == ("stopped", 0)


async def test_unwanted_members_are_stopped_and_forgotten(members):
    report = await members.start(order("import time; time.sleep(600)"))
    await members.discard(members.named(["j/role/0", "j/role/7"]))
    assert members.reports() == []
    assert not Path(f"/proc/{report.pid}").exists()


async def test_a_later_attempt_replaces_a_member_and_an_old_discard_does_not_touch_it(members):
    first = await members.start(order("import time; time.sleep(600)", attempt=1))
    unwanted = members.named(["j/role/0"])
    second = await members.start(order("import time; time.sleep(600)", attempt=2))
    assert not Path(f"/proc/{first.pid}").exists()
    await members.discard(unwanted)
    (report,) = members.reports()
    assert (report.pid, report.state, report.attempt) == (second.pid, "running", 2)


async def test_a_member_that_ended_by_itself_runs_again_in_a_later_attempt(members):
    await members.start(order("pass", attempt=1))
    assert (await ended(members)).state == "succeeded"
    again = await members.start(order("import time; time.sleep(600)", attempt=2))
    assert again.state == "running"


def devices(environment: dict[str, str], inside: bool, **fields) -> list[str]:
    return devices_of(order("pass", **fields), environment.get("CUDA_VISIBLE_DEVICES", ""), inside)


def test_inside_an_allocation_the_kth_gpu_of_the_job_is_the_kth_visible_device():
    held = {"gpu_indices": (5, 7), "node_gpu_indices": (4, 5, 7)}
    assert devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, True, **held) == ["1", "2"]
    assert devices({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, True, **held) == ["GPU-b", "GPU-c"]
    assert devices({}, True, **held) == ["5", "7"]
    assert devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, False, **held) == ["5", "7"]


async def test_a_closed_table_starts_nothing(members):
    await members.close()
    with pytest.raises(RuntimeError, match="shutting down"):
        await members.start(order("pass"))


async def test_a_member_that_floods_its_output_can_be_stopped(members):
    await members.start(order("while True: print('x' * 1000)", stop_grace_seconds=1.0))
    async with asyncio.timeout(HANG_SECONDS):
        await members.stop("j/role/0", None, "enough")


def cpu_ticks(pid: int) -> int:
    """Processor time that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_member_that_closes_its_output_does_not_spin_its_keeper(members, tmp_path):
    script = "import os, pathlib, time; os.close(1); os.close(2); pathlib.Path('closed').touch(); time.sleep(600)"
    report = await members.start(order(script))
    async with asyncio.timeout(HANG_SECONDS):
        while not (tmp_path / "closed").exists():
            await asyncio.sleep(0.02)
    keeper = parents()[report.pid]
    before = cpu_ticks(keeper)
    await asyncio.sleep(1.0)
    assert cpu_ticks(keeper) - before < 10
    assert (await members.stop("j/role/0", None, "enough")).state == "stopped"


async def test_log_folders_of_ended_jobs_are_kept_up_to_a_number(tmp_path):
    table = MemberTable(Household("n1", dict(os.environ), tmp_path, log_limit_bytes=1 << 16, keep_job_logs=2))
    logs = tmp_path / "logs"
    try:
        await table.start(order("import time; time.sleep(600)"))
        for number in range(5):
            (logs / f"old-{number}").mkdir()
            (logs / f"old-{number}" / "role-0.log").touch()
            for path in (logs / f"old-{number}", logs / f"old-{number}" / "role-0.log"):
                os.utime(path, (1e9 + number, 1e9 + number))
        os.utime(logs / "j", (1e8, 1e8))
        os.utime(logs / "j" / "role-0.log", (1e8, 1e8))
        await table.start(RoleOrder("k/role/0", "jobs/k", "role", 0, 1, ("python", "-c", "pass")))
        assert {path.name for path in logs.iterdir()} == {"j", "k", "old-3", "old-4"}
    finally:
        await table.close()
