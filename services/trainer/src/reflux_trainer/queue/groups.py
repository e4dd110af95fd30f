"""The trainer's side of the queue: issue prompts, read graded groups, close those that are not trained on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reflux_trainer.queue.client import RedisClient
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.queue.records import Group, Prompt
from reflux_trainer.queue.scripts import Scripts
from reflux_trainer.queue.streams import entries_of


@dataclass(frozen=True)
class DeadPrompt:
    """A prompt that failed for good; it counts as consumed."""

    index: int
    entry: str


Arrival = Group | DeadPrompt
Closing = Literal["filtered", "unknown", "dead", "stale"]


class GroupQueue:
    """What one attempt of the trainer reads and writes. All writes may be repeated without a further effect."""

    def __init__(self, redis: RedisClient, run: str, attempt: int) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._keys = RunKeys(run)
        self._attempt = attempt
        self._last = "0-0"

    async def issue(self, prompts: Sequence[Prompt]) -> int:
        """Puts prompts on the stream; returns how many of them were new. Raises Fenced."""
        arguments: list[Any] = [self._attempt]
        for prompt in prompts:
            arguments += [prompt.index, prompt.to_bytes()]
        return int(
            await self._scripts.run("issue", [self._keys.cursor, self._keys.ledger, self._keys.prompts], arguments)
        )

    async def read(self, block_ms: int) -> list[Arrival]:
        """Groups that arrived since the last call, the unconsumed ones of earlier attempts first."""
        answer = await self._redis.xread({self._keys.groups: self._last}, count=512, block=block_ms)
        arrivals: list[Arrival] = []
        for entry, fields in entries_of(answer):
            self._last = entry.decode()
            payload = fields[b"p"]
            arrivals.append(
                Group.from_bytes(payload, self._last) if payload else DeadPrompt(int(fields[b"i"]), self._last)
            )
        return arrivals

    async def opened(self) -> dict[int, int]:
        """Weight version at issue of every prompt on the streams: those that no worker has ended, and what arrived.

        A dead one, which is read and closed at once, has none: -1.
        """
        versions: dict[int, int] = {}
        for key, record in ((self._keys.prompts, Prompt), (self._keys.groups, Group)):
            for _entry, fields in await self._redis.xrange(key):
                payload = fields[b"p"]
                versions[int(fields[b"i"])] = record.from_bytes(payload).version if payload else -1
        return versions

    async def close(self, closed: Iterable[tuple[Arrival, Closing]]) -> None:
        """Marks groups as consumed without training. Raises Fenced."""
        arguments: list[Any] = [self._attempt]
        for arrival, state in closed:
            arguments += [arrival.index, state, arrival.entry]
        if len(arguments) > 1:
            await self._scripts.run("close", [self._keys.cursor, self._keys.ledger, self._keys.groups], arguments)

    async def depths(self) -> tuple[int, int]:
        """Prompts that are not emitted yet, and groups that wait for the trainer."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.xlen(self._keys.prompts)
        pipe.xlen(self._keys.groups)
        prompts, groups = await pipe.execute()
        return int(prompts), int(groups)

    async def worker_beats(self) -> dict[str, int]:
        """Heartbeats of each worker so far."""
        beats = await self._redis.hgetall(self._keys.workers)
        return {name.decode(): int(count) for name, count in beats.items()}

    async def forget_workers(self, names: Sequence[str]) -> None:
        """Drops the heartbeats of workers; one that lives after all begins anew."""
        await self._redis.hdel(self._keys.workers, *names)
