"""The rollout worker's side of the queue: claim, keep alive, store, emit, fail."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from redis.exceptions import ResponseError

from reflux_trainer.queue.client import RedisClient
from reflux_trainer.queue.keys import GROUP, RunKeys
from reflux_trainer.queue.records import Generation, Group, Prompt
from reflux_trainer.queue.scripts import Scripts
from reflux_trainer.queue.streams import entries_of

MAX_ATTEMPTS = 3
"""Failures by its own fault after which a prompt becomes a dead letter."""
MAX_TAKES = 8
"""Claims after which a prompt that never ended counts as poison: it takes its workers down."""


@dataclass(frozen=True)
class Claim:
    """A prompt that this worker owns as long as the token is the newest."""

    prompt: Prompt
    entry: str
    token: int
    takes: int
    stored: Generation | None
    """Samples that an earlier owner generated."""


class PromptQueue:
    """Claims of one worker on the prompts of one run. All writes may be repeated without a further effect."""

    def __init__(self, redis: RedisClient, run: str, worker: str) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._keys = RunKeys(run)
        self.worker = worker

    async def open(self) -> None:
        """Creates the consumer group when it is not there."""
        try:
            await self._redis.xgroup_create(self._keys.prompts, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def claim(self, count: int, block_ms: int) -> list[Claim]:
        """Up to `count` new prompts; waits `block_ms` for the first, then returns an empty list."""
        try:
            answer = await self._redis.xreadgroup(
                GROUP, self.worker, {self._keys.prompts: ">"}, count=count, block=block_ms
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.open()  # the stream is gone with a Redis that came back empty
            return []
        return await self._take(entries_of(answer))

    async def claim_abandoned(self, count: int, min_idle_ms: int) -> list[Claim]:
        """Up to `count` prompts whose owner has not been heard of for `min_idle_ms`."""
        answer = await self._redis.xautoclaim(
            self._keys.prompts, GROUP, self.worker, min_idle_time=min_idle_ms, start_id="0-0", count=count
        )
        return await self._take([(entry, fields) for entry, fields in answer[1] if fields])

    async def _take(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Claim]:
        if not entries:
            return []
        keys = self._keys
        arguments: list[Any] = [GROUP]
        for entry, fields in entries:
            arguments += [entry, fields[b"i"]]
        answers = await self._scripts.run(
            "take", [keys.ledger, keys.prompts, keys.claims, keys.counters, keys.samples, keys.takes], arguments
        )
        return [
            Claim(
                Prompt.from_bytes(fields[b"p"]),
                entry.decode(),
                int(token),
                int(takes),
                Generation.from_bytes(stored) if stored else None,
            )
            for (entry, fields), (token, takes, stored) in zip(entries, answers, strict=True)
            if token
        ]

    async def heartbeat(self, claims: Iterable[Claim]) -> set[int]:
        """Keeps `claims` alive and shows that the worker lives; returns the indices of those that were lost."""
        keys = self._keys
        arguments: list[Any] = [GROUP, self.worker]
        for claim in claims:
            arguments += [claim.entry, claim.prompt.index, claim.token]
        lost = await self._scripts.run("heartbeat", [keys.prompts, keys.claims, keys.workers], arguments)
        return {int(index) for index in lost}

    async def store(self, claim: Claim, generation: Generation) -> bool:
        """Keeps generated samples; False when the claim was lost."""
        keys = self._keys
        arguments = [claim.prompt.index, claim.token, generation.to_bytes()]
        return bool(await self._scripts.run("store", [keys.claims, keys.samples], arguments))

    async def emit(self, claim: Claim, group: Group) -> Literal["emitted", "duplicate", "stale"]:
        """Hands the group to the trainer; only one call over all workers has an effect."""
        keys = self._keys
        names = [keys.ledger, keys.prompts, keys.claims, keys.samples, keys.groups, keys.takes, keys.attempts]
        arguments = [GROUP, claim.entry, claim.prompt.index, claim.token, group.to_bytes()]
        answer: bytes = await self._scripts.run("emit", names, arguments)
        return answer.decode()  # type: ignore[return-value]

    async def fail(self, claim: Claim, error: str, *, counted: bool) -> Literal["retry", "dead", "stale"]:
        """Gives the prompt back. `counted` failures are its own fault and end in a dead letter at MAX_ATTEMPTS."""
        keys = self._keys
        names = [keys.ledger, keys.prompts, keys.claims, keys.attempts, keys.dead]
        limit = 0 if claim.takes >= MAX_TAKES else MAX_ATTEMPTS
        arguments = [GROUP, claim.entry, claim.prompt.index, claim.token, int(counted), limit, error[:2000]]
        answer: bytes = await self._scripts.run("fail", [*names, keys.groups, keys.samples, keys.takes], arguments)
        return answer.decode()  # type: ignore[return-value]
