"""What does a verdict in a pre-forked child save against starting Python, and does anything leak over 10^4 children?

`vs_cold_python`: p50 of `python -c` with the imports of the XRD surrogate, over p50 of ours: from the moment that the
job is in hand until the verdict of the real XRD surrogate on a held-out problem is, in a single-use child of the
prefork tier. `vs_bwrap`: the same Python inside bubblewrap (all namespaces, read-only root). The cold starts do no
work beyond the imports. Each round has one turn of each of them and ten of ours, in an order that rotates, with a pause
after each of ours in which the pool refills.

`leaks`: children that ran a line of code each, four at one time; afterwards the processes, descriptors, control groups
with processes and temporary folders that are there beyond those at the start, and one more when the resident memory of
this process grows from the second quarter to the last by more than 2 %. 10^4 children; REFLUX_BENCH_FULL=1: 10^5.

Last line: one JSON object.
"""

import asyncio
import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from reflux_sandbox.execution import CodeRequest, GradeSession, run_code
from reflux_sandbox.isolation.choose import open_isolation
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.settings import SandboxSettings
from reflux_tasks.registry import create_task

TASK, VERIFIER = "xrd-phase-id", "xrd-phase-id/surrogate"
IMPORTS = "import reflux_tasks.xrd.surrogate"
COLD = [sys.executable, "-c", IMPORTS]
WALLS = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
ROUNDS, OURS_PER_ROUND, PAUSE_SECONDS = 40, 10, 0.03
FULL = os.environ.get("REFLUX_BENCH_FULL") == "1"
CHILDREN, AT_ONCE, SAMPLES = 100_000 if FULL else 10_000, 4, 40
GROWTH = 1.02


@asynccontextmanager
async def opened(folder: str, **changes: str) -> AsyncIterator[PreforkIsolation]:
    """The prefork tier as the service starts it."""
    options = SandboxSettings(**changes).isolation_options(folder)  # type: ignore[arg-type]
    async with open_isolation("prefork", **options) as (isolation, _):
        assert isinstance(isolation, PreforkIsolation)
        yield isolation


def milliseconds(command: list[str]) -> float:
    """One cold start."""
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return (time.perf_counter() - start) * 1000


def make_dispatch(isolation: PreforkIsolation, folder: Path) -> Callable[[], Awaitable[float]]:
    """Milliseconds until the verdict of the surrogate; the child is ended outside the measurement."""
    task = create_task(TASK, 0, folder)
    problem = task.problem("heldout", 3)
    payload, answer = json.dumps(task.truth(problem)), task.decode(task.answer_ids(problem))

    async def dispatch() -> float:
        start = time.perf_counter()
        async with GradeSession(isolation, "grade", 256 << 20, 60, family=TASK) as session:
            verdict = await session.grade(VERIFIER, payload, [answer])
            spent = (time.perf_counter() - start) * 1000
        assert verdict["grades"][0]["outcome"] == "scored", verdict
        await asyncio.sleep(PAUSE_SECONDS)
        return spent

    return dispatch


async def starts() -> dict[str, float]:
    """The comparison with cold starts."""
    cold = {"cold python": COLD}
    if shutil.which("bwrap") is None:
        print("bwrap is not installed: vs_bwrap is left out")
    else:
        cold["bwrap + python"] = [*WALLS, *COLD]
    times: dict[str, list[float]] = {name: [] for name in ("ours", *cold)}
    folder = Path(tempfile.gettempdir(), "reflux-bench-xrd")
    folder.mkdir(exist_ok=True)  # kept: the phases take seconds to build
    async with opened(str(folder)) as isolation:
        dispatch = make_dispatch(isolation, folder)
        for number in range(ROUNDS + 1):
            names = list(times)
            shift = number % len(names)
            for name in (*names[shift:], *names[:shift]):
                if name == "ours":
                    turn = [await dispatch() for _ in range(OURS_PER_ROUND)]
                else:
                    turn = [await asyncio.to_thread(milliseconds, cold[name])]
                times[name] += turn if number else []  # the first round warms up
    p50 = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name}: p50 {p50[name]:.2f} ms [{min(values):.2f} {max(values):.2f}], {len(values)} times")
    keys = {"cold python": "vs_cold_python", "bwrap + python": "vs_bwrap"}
    return {keys[name]: p50[name] / p50["ours"] for name in cold}


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, zombies too."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def busy_groups(isolation: PreforkIsolation) -> int:
    """Control groups with a process in them, and all that this process has made."""
    procs = isolation.cgroup_procs(0)
    folders = [folder for path in procs for folder in Path(path).parents[1].iterdir() if folder.is_dir()]
    return len(folders) + sum(bool((folder / "cgroup.procs").read_text()) for folder in folders)


async def settled(isolation: PreforkIsolation, idle: int) -> dict[str, int]:
    """What is there when nothing is at work and the pools are full."""
    while isolation.idle_children != idle or isolation.busy_children:  # noqa: ASYNC110  nobody tells
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # ended children are reaped
    return {
        "processes": len(descendants(os.getpid())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "control groups": busy_groups(isolation),
        "temporary folders": sum(1 for _ in Path(tempfile.gettempdir()).glob("reflux-*")),
    }


def resident_bytes() -> int:
    """Of this process, after a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def leaks() -> dict[str, float]:
    """Runs the children and counts what they leave."""
    request = CodeRequest(code="open('f', 'w').write('x'); print(1)", wall_seconds=60, memory_bytes=128 << 20)
    idle = SandboxSettings().idle_children
    memory: list[int] = []

    async def work(isolation: PreforkIsolation, count: int) -> None:
        for _ in range(count):
            result = await run_code(await isolation.acquire(), request)
            assert (result.status, result.stdout) == ("ok", b"1\n"), result

    with tempfile.TemporaryDirectory() as folder:
        async with opened(folder, graders="") as isolation:
            await work(isolation, AT_ONCE)
            before = await settled(isolation, idle)
            start = time.perf_counter()
            for _ in range(SAMPLES):
                await asyncio.gather(*(work(isolation, CHILDREN // SAMPLES // AT_ONCE) for _ in range(AT_ONCE)))
                memory.append(resident_bytes())
            seconds = time.perf_counter() - start
            after = await settled(isolation, idle)
    early = statistics.median(memory[SAMPLES // 4 : SAMPLES // 2])
    late = statistics.median(memory[-SAMPLES // 4 :])
    left = {name: max(0, after[name] - count) for name, count in before.items()}
    print(f"{CHILDREN} children in {seconds:.0f} s; left: {left}; resident {early / 1e6:.1f} -> {late / 1e6:.1f} MB")
    slope = (late - early) / (CHILDREN / 2 / 1000)
    return {"leaks": sum(left.values()) + (late > early * GROWTH), "rss_slope_bytes_per_1000": slope}


async def main() -> None:
    """Prints the figures."""
    figures = {**await starts(), **await leaks()}
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    asyncio.run(main())
