"""How many verdicts per second on trivial verifications, on two cores, through the whole service?

The service runs in a process of its own on two cores with a real Valkey (appendfsync always); a client creates jobs of
one answer in batches and follows them on one watch stream. The clock runs from the first creation to the last verdict
on the stream. `verdicts_per_s` is the median of the rounds with a trusted verifier (its jobs share a child for as long
as the settings say); `verdicts_apart_per_s` uses a confined child for each job and has no bar.

Last line: one JSON object.
"""

import asyncio
import json
import statistics
import time

import stack

ROUNDS = 5
JOBS = {"bench/trivial": 2000, "bench/apart": 200}


async def rate(stub: "stack.SandboxServiceAsyncStub", verifier: str, round_number: int) -> float:
    """Verdicts per second of one round."""
    requests = [stack.creation(verifier, [f"{round_number} {number}"]) for number in range(JOBS[verifier])]
    start = time.perf_counter()
    jobs = await stack.ended(stub, requests)
    seconds = time.perf_counter() - start
    assert sum(job.executed_answers for job in jobs) == len(requests), "nothing came from the cache"
    return len(jobs) / seconds


async def main() -> None:
    """Prints the figures."""
    rates: dict[str, list[float]] = {verifier: [] for verifier in JOBS}
    async with stack.open_valkey() as url, stack.open_sandbox(url) as stub:
        for round_number in range(ROUNDS + 1):
            for verifier in JOBS:
                value = await rate(stub, verifier, round_number)
                if round_number:  # the first one warms up
                    rates[verifier].append(value)
    for verifier, values in rates.items():
        print(f"{verifier}: {', '.join(f'{value:.0f}' for value in values)} per s")
    trivial, apart = (statistics.median(rates[verifier]) for verifier in JOBS)
    print(json.dumps({"verdicts_per_s": round(trivial, 1), "verdicts_apart_per_s": round(apart, 1)}))


if __name__ == "__main__":
    asyncio.run(main())
