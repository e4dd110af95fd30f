"""Limits of members by the kernel: skipped by name where this user may not write control groups."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from reflux_scheduler.agent.cgroup import MemberGroups

MIB = 1 << 20
EATER = (
    "import os, sys\nfor path in sys.argv[2:]:\n    open(path, 'w').write('0')\nheld = bytearray(int(sys.argv[1]))\n"
)


@pytest.fixture
def groups() -> Iterator[MemberGroups]:
    groups = MemberGroups.open()
    if not groups.folders:
        pytest.skip(groups.reason)
    yield groups
    groups.close()


def eat(size_bytes: int, procs: tuple[str, ...]) -> int:
    """Status of a process that joins the groups and then takes memory."""
    return subprocess.run([sys.executable, "-I", "-S", "-c", EATER, str(size_bytes), *procs], timeout=60).returncode


def test_a_member_over_its_memory_is_killed_and_the_kill_is_counted(groups: MemberGroups) -> None:
    procs = groups.enter("job/eater/0", 64 * MIB, 0)
    assert eat(256 * MIB, procs) == -9
    assert groups.memory_kills("job/eater/0") >= 1


def test_a_member_within_its_memory_runs_and_its_group_goes_with_it(groups: MemberGroups) -> None:
    procs = groups.enter("job/modest/0", 256 * MIB, 500)
    assert eat(16 * MIB, procs) == 0
    groups.leave("job/modest/0")
    assert groups.memory_kills("job/modest/0") == 0
    assert not [path for folder in groups.folders.values() for path in folder.iterdir() if path.is_dir()]


def test_groups_are_gone_after_the_agent_has_closed_them(groups: MemberGroups) -> None:
    groups.enter("job/a/0", 64 * MIB, 1000)
    assert all(folder.exists() for folder in groups.folders.values())
    groups.close()
    assert not any(folder.exists() for folder in groups.folders.values())
