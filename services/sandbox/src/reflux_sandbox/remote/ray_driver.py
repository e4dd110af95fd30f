"""The driver of the Ray backend, a process of its own: JSON lines in on stdin, out on stdout.

A Ray driver is no good guest in a service: it replaces signal handlers, keeps threads that a fork must not meet, and
ends its process when the head of the cluster stays away. It ends when stdin ends, and its actors with it.

    in:  {"open": {...}} once, {"number": n, "request": {...}}, {"cancel": n}
    out: {"opened": true}, {"number": n, "answer": {...}}, {"number": n, "lost": text}
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from reflux_sandbox.remote.ray_actor import Grader

_CLOSE_SECONDS = 5.0

Say = Callable[[dict[str, Any]], None]


class Driver:
    """Gives each request to the least busy grader."""

    def __init__(self, opening: dict[str, Any], say: Say) -> None:
        self._say = say
        self._jobs = max(1, int(opening["cpus"]))
        options: dict[str, Any] = {"num_cpus": opening["cpus"], "resources": opening["resources"], "max_restarts": -1}
        options |= {"max_concurrency": self._jobs + 2, "scheduling_strategy": "SPREAD"}
        make: Any = ray.remote(**options)(Grader)
        arguments = (opening["node"], opening["cache_folder"], self._jobs)
        self._actors: list[Any] = [make.remote(*arguments) for _ in range(opening["actors"])]
        self._busy = [0] * len(self._actors)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(self._jobs * len(self._actors))

    def obey(self, message: dict[str, Any]) -> None:
        """Starts or cancels a request."""
        if "cancel" in message:
            if (call := self._calls.get(message["cancel"])) is not None:
                call.cancel()
            return
        number = message["number"]
        self._calls[number] = asyncio.create_task(self._call(number, message["request"]))
        self._calls[number].add_done_callback(lambda _: self._calls.pop(number, None))

    async def close(self) -> None:
        """Ends the children of all graders; Ray ends the actors."""
        for call in list(self._calls.values()):
            call.cancel()
        closing = [asyncio.ensure_future(_awaited(actor.close.remote())) for actor in self._actors]
        await asyncio.wait(closing, timeout=_CLOSE_SECONDS)

    async def _call(self, number: int, request: dict[str, Any]) -> None:
        async with self._free:
            chosen = self._busy.index(min(self._busy))
            self._busy[chosen] += 1
            reference = self._actors[chosen].grade.remote(request)
            try:
                self._say({"number": number, "answer": await reference})
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise
            except RayTaskError as error:
                self._say({"number": number, "answer": {"error": "crash", "message": str(error.cause)[:2000]}})
            except (RayActorError, RayError) as error:
                self._say({"number": number, "lost": f"{type(error).__name__}: {error}"[:500]})
            finally:
                self._busy[chosen] -= 1


async def _awaited(reference: Any) -> Any:
    return await reference


def _private_output() -> Say:
    """Writes lines to what was stdout. Ray and whatever it loads may print: that goes to stderr from here on."""
    output = os.dup(1)
    os.dup2(2, 1)
    return lambda message: _write(output, json.dumps(message).encode() + b"\n")


def _write(output: int, line: bytes) -> None:
    while line:
        line = line[os.write(output, line) :]


async def _serve(say: Say) -> None:
    reader = asyncio.StreamReader(limit=64 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    opening = json.loads(await reader.readline())["open"]
    ray.init(opening["address"], log_to_driver=False, configure_logging=False)
    driver = Driver(opening, say)
    say({"opened": True})
    while line := await reader.readline():
        driver.obey(json.loads(line))
    await driver.close()


if __name__ == "__main__":
    asyncio.run(_serve(_private_output()))
