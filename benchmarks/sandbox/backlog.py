"""What do 10^5 queued jobs cost Redis, and how fast are they created?

Batches of 200 jobs over gRPC, two in flight, into the real service with a real Valkey (appendonly, appendfsync always).
Eight jobs share a problem of 4 KB; each has one answer of 240 characters of its own, a group, a sample id and a policy
version, as the ladder creates them. One job is at work all the time, the others wait. `queue_100k_redis_mb` is what
`used_memory` grew by; `queue_100k_aof_mb` (no bar) is the size of the log.

Last line: one JSON object.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator

import redis.asyncio
import stack

from reflux.sandbox.v1 import sandbox_service_pb2 as pb

JOBS, BATCH, IN_FLIGHT, PER_GROUP = 100_000, 200, 2, 8


def batches() -> Iterator[pb.BatchCreateVerificationsRequest]:
    """Requests with fixed contents; only the request ids differ from time to time."""
    dice = random.Random(7)
    for first in range(0, JOBS, BATCH):
        requests = []
        for number in range(first, min(JOBS, first + BATCH)):
            group = number // PER_GROUP
            if number % PER_GROUP == 0 or not requests:
                payload = json.dumps({"group": group, "pattern": dice.randbytes(2000).hex()}).encode()
            answer = dice.randbytes(120).hex()
            about = {
                "group": f"prompt/{group}",
                "policy_version": group // 100,
                "sample_ids": [f"bench/{group}/{number % 8}"],
            }
            requests.append(stack.creation("bench/held", [answer], payload, **about))
        yield pb.BatchCreateVerificationsRequest(requests=requests)


async def create(stub: "stack.SandboxServiceAsyncStub", work: Iterator[pb.BatchCreateVerificationsRequest]) -> float:
    """Sends batches one after the other; seconds in which the service worked."""
    spent = 0.0
    for batch in work:
        start = time.perf_counter()
        await stub.BatchCreateVerifications(batch, timeout=60)
        spent += time.perf_counter() - start
    return spent


async def main() -> None:
    """Prints the figures."""
    async with (
        stack.open_valkey() as url,
        redis.asyncio.from_url(url) as client,
        stack.open_sandbox(url, most_queued=str(2 * JOBS)) as stub,
    ):
        before = (await client.info("memory"))["used_memory"]
        prepared = list(batches())
        work = iter(prepared)
        start = time.perf_counter()
        await asyncio.gather(*(create(stub, work) for _ in range(IN_FLIGHT)))
        seconds = time.perf_counter() - start
        status = await stub.GetStatus(pb.GetStatusRequest())
        waiting = sum(queue.depth for queue in status.queues)
        memory = (await client.info("memory"))["used_memory"] - before
        log = (await client.info("persistence"))["aof_current_size"]
    print(f"{waiting} jobs wait; created in {seconds:.1f} s; {memory / JOBS:.0f} bytes each; log {log / 1e6:.0f} MB")
    assert waiting >= JOBS - 2, "the jobs wait"
    figures = {"queue_100k_redis_mb": memory / 1e6, "create_per_s": JOBS / seconds, "queue_100k_aof_mb": log / 1e6}
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    asyncio.run(main())
