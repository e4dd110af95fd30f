"""kill -9 of templates and children at random points: work ends with a typed outcome, the pools heal, nothing leaks."""

import asyncio
import gc
import os
import random
import signal
from pathlib import Path

import pytest

from reflux_sandbox.execution import CodeRequest, GradeSession, SessionLost, run_code
from reflux_sandbox.isolation.prefork import PreforkIsolation

FAMILIES = ("", "test")


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def everything_below(pid):
    return [below for child in children(pid) for below in (child, *everything_below(child))]


def groups(isolation):
    return [Path(path) for number in range(40) for path in isolation.cgroup_procs(number) if Path(path).exists()]


def kill_at_random(isolation, dice):
    """Kills a template now and then, else one of its children, at work or not; tells whether somebody died."""
    try:
        launcher = isolation.warm_parent_pid(dice.choice(FAMILIES))
    except AssertionError:  # it is being replaced
        return False
    warm = children(launcher)
    below = [each for pid in warm for each in everything_below(pid)]
    victims = warm if dice.random() < 0.03 else below
    if not victims:
        return False
    try:
        os.kill(dice.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


async def one_piece(isolation, number):
    """What an owner of work does: tries again when the child is lost."""
    outcomes = []
    while True:
        try:
            if number % 2:
                async with asyncio.timeout(120), GradeSession(isolation, "grade", 256 << 20, 60, family="test") as work:
                    answer = await work.grade("test/length", "{}", ["x" * number])
                    assert answer["grades"][0]["reward"] == number
                return [*outcomes, "ok"]
            request = CodeRequest(
                code=f"import time; time.sleep(0.01); print({number})", wall_seconds=60, memory_bytes=128 << 20
            )
            result = await run_code(await isolation.acquire(), request)
            outcomes.append(result.status)
            if result.status == "ok":
                assert result.stdout == b"%d\n" % number
                return outcomes
        except SessionLost:
            outcomes.append("lost")


async def settled(isolation):
    for _ in range(6000):
        if isolation.idle_children == 4 and isolation.busy_children == 0:
            gc.collect()
            return len(everything_below(os.getpid())), len(list(Path("/proc/self/fd").iterdir()))
        await asyncio.sleep(0.01)
    pytest.fail("the pools did not heal within 60 s")


async def deaths(isolation_options, pieces, seed):
    isolation = PreforkIsolation(**isolation_options())
    await isolation.start()
    dice = random.Random(seed)
    try:
        before, (_, descriptors) = groups(isolation), await settled(isolation)
        work = [asyncio.create_task(one_piece(isolation, number)) for number in range(pieces)]
        kills = 0
        while kills < pieces // 2:
            if not (await asyncio.wait(work, timeout=dice.uniform(0.0, 0.03)))[1]:
                break
            kills += kill_at_random(isolation, dice)
        ends = await asyncio.gather(*work)
        processes, after = await settled(isolation)
        assert after <= descriptors, "what earlier tests have left in this process may close meanwhile"
        assert processes == len(everything_below(os.getpid()))
        assert groups(isolation) == before
        assert {outcome for outcomes in ends for outcome in outcomes} <= {"ok", "lost", "infra_error", "signal"}
        assert all(outcomes[-1] == "ok" for outcomes in ends)
        assert kills > 0
    finally:
        await isolation.close()
    assert not any(path.exists() for path in before)


async def test_deaths_at_random_points_lose_no_work_and_leak_nothing(namespaces, isolation_options):
    await deaths(isolation_options, 24, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_a_thousand_deaths_lose_no_work_and_leak_nothing(namespaces, isolation_options, seed):
    await deaths(isolation_options, 250, seed)
