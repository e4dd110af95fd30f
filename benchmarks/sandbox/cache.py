"""How often do eight equal answers run: in one group, in eight jobs, in eight runs, while one flies and afterwards?

Answers that each way executed, as the service counts them on its jobs. `cache_executions_of_8` is the worst way.

Last line: one JSON object.
"""

import asyncio
import json

import stack

from reflux.sandbox.v1 import sandbox_service_pb2 as pb


def ways() -> dict[str, list[pb.CreateVerificationRequest]]:
    """Eight equal answers each."""
    name = "bench/apart"
    return {
        "one group": [stack.creation(name, ["in a group"] * 8)],
        "eight jobs": [stack.creation(name, ["in jobs"]) for _ in range(8)],
        "groups that overlap": [stack.creation(name, ["overlap", "overlap"]) for _ in range(4)],
        "white space": [stack.creation(name, [f"a{' ' * (1 + number)}b"]) for number in range(8)],
    }


async def main() -> None:
    """Prints the figures."""
    executed: dict[str, int] = {}
    async with stack.open_valkey() as url, stack.open_sandbox(url) as stub:
        for name, requests in ways().items():
            executed[name] = sum(job.executed_answers for job in await stack.ended(stub, requests))
            again = await stack.ended(stub, [stack.creation(each.verifier, each.answers) for each in requests])
            executed[f"{name}, again"] = sum(job.executed_answers for job in again) + executed[name]
    for name, count in executed.items():
        print(f"{name}: {count} executed")
    print(json.dumps({"cache_executions_of_8": max(executed.values())}))


if __name__ == "__main__":
    asyncio.run(main())
