"""How long from the dispatch of a trivial verification to its verdict, with warm children and nothing else to do?

What is measured: from the moment that a job is in hand until its verdict is: take a confined single-use child from the
prefork pool, send it the job, get the grade. One job at a time, a pause after each, in which the child is ended and the
pool refills (an idle machine: that work is not in the way of the next job). `job_p50_ms` and `job_p99_ms` are the whole
way of a client through the real service: CreateVerification until the watch stream has delivered the verdict, with two
durable writes of Redis (appendfsync always) in it; they have no bar.

Last line: one JSON object.
"""

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import stack

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux_sandbox.execution import GradeSession
from reflux_sandbox.isolation.choose import open_isolation
from reflux_sandbox.settings import SandboxSettings

WARM_UP, JOBS = 20, 400
PAUSE_SECONDS = 0.03
MEMORY_BYTES = 256 << 20


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


async def dispatches() -> list[float]:
    """Milliseconds of each dispatch."""
    settings = SandboxSettings(graders="bench_graders", import_folders=(str(stack.HERE),))
    times = []
    with tempfile.TemporaryDirectory() as folder:
        options = settings.isolation_options(str(Path(folder).resolve()))
        async with open_isolation("prefork", **options) as (isolation, _):
            (info,) = [info for info in isolation.verifiers if info.name == "bench/trivial"]
            for number in range(WARM_UP + JOBS):
                start = time.perf_counter()
                async with GradeSession(isolation, info.profile, MEMORY_BYTES, 60, family=info.family) as session:
                    answer = await session.grade(info.name, "{}", [f"answer {number}"])
                    times.append((time.perf_counter() - start) * 1000)
                    assert answer["grades"][0]["outcome"] == "scored", answer
                await asyncio.sleep(PAUSE_SECONDS)
    return times[WARM_UP:]


async def jobs() -> list[float]:
    """Milliseconds of each job through the service."""
    times = []
    async with stack.open_valkey() as url, stack.open_sandbox(url) as stub:
        watch = stub.WatchVerifications(pb.WatchVerificationsRequest(run=stack.RUN))
        await watch.initial_metadata()
        for number in range(WARM_UP + JOBS):
            start = time.perf_counter()
            await stub.CreateVerification(stack.creation("bench/trivial", [f"answer {number}"]))
            await watch.read()
            times.append((time.perf_counter() - start) * 1000)
            await asyncio.sleep(PAUSE_SECONDS)
        watch.cancel()
    return times[WARM_UP:]


async def main() -> None:
    """Prints the figures."""
    ours, whole = await dispatches(), await jobs()
    for name, times in (("dispatch", ours), ("job", whole)):
        spread = statistics.quantiles(times, n=4)
        print(f"{name}: quartiles {', '.join(f'{value:.2f}' for value in spread)} ms, worst {max(times):.2f} ms")
    figures = {
        "dispatch_p50_ms": percentile(ours, 50),
        "dispatch_p99_ms": percentile(ours, 99),
        "job_p50_ms": percentile(whole, 50),
        "job_p99_ms": percentile(whole, 99),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    asyncio.run(main())
