"""Late rewards in Redis: what was trained provisionally, and the final rewards that have come.

An entry of what was trained names the operation that trained it, and the one that corrected it. Both count only once
the ledger has logged them: a trainer that dies in between has them undone by the next attempt, before its operations
take the same numbers, so that no correction is lost or doubled.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from reflux_trainer.algo.rewards import Rewards
from reflux_trainer.late.correction import Provisional
from reflux_trainer.queue.client import RedisClient
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.queue.records import Group


@dataclass(frozen=True)
class Trained:
    """A group that was trained on provisional rewards, or filtered because of them."""

    group: Group
    advantages: list[float]
    """Those that were trained; 0 for members or groups that were not."""
    op_id: int
    """Operation that trained it; 0 for a filtered group, which none trained."""
    corrected_by: int = 0
    """Operation of its correction; 0 before one was planned."""

    @property
    def provisional(self) -> Provisional:
        versions = [sample.oldest_version for sample in self.group.samples if sample.versions]
        return Provisional(
            index=self.group.index,
            oldest_version=min(versions, default=self.group.version),
            advantages_G=np.array(self.advantages),
        )

    def to_bytes(self) -> bytes:
        row = {"advantages": self.advantages, "op_id": self.op_id, "corrected_by": self.corrected_by}
        return json.dumps(row, separators=(",", ":")).encode() + b"\n" + self.group.to_bytes()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        head, _, group = raw.partition(b"\n")
        return cls(Group.from_bytes(group), **json.loads(head))


class LateStore:
    """The late rewards of one run."""

    def __init__(self, redis: RedisClient, run: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run)

    async def remember(self, trained: Iterable[Trained]) -> None:
        """Keeps groups until their final rewards come."""
        rows = {str(each.group.index): each.to_bytes() for each in trained}
        if rows:
            await self._redis.hset(self._keys.late_trained, mapping=rows)

    async def settled(self) -> dict[int, Rewards]:
        """Final rewards that have come, by prompt index; NaN is unknown."""
        rows = await self._redis.hgetall(self._keys.late_settled)
        return {int(index): np.array(json.loads(raw), dtype=np.float64) for index, raw in rows.items()}

    async def trained(self, indices: Iterable[int]) -> dict[int, Trained]:
        """What was trained of some prompts; those that are not kept are left out."""
        names = [str(index) for index in indices]
        if not names:
            return {}
        rows = await self._redis.hmget(self._keys.late_trained, names)
        return {int(name): Trained.from_bytes(raw) for name, raw in zip(names, rows, strict=True) if raw}

    async def plan(self, trained: Iterable[Trained], op_id: int) -> None:
        """Notes which operation is about to correct groups."""
        await self.remember(replace(each, corrected_by=op_id) for each in trained)

    async def undo(self, op_id: int) -> None:
        """Takes back what operations beyond the last logged one did: the same numbers will name other operations.

        Groups that they were to train arrive again, corrections that they were to make are planned again. Filtered
        groups stay: they are closed already.
        """
        untrained: list[bytes] = []
        uncorrected: list[Trained] = []
        async for name, raw in self._redis.hscan_iter(self._keys.late_trained):
            head = json.loads(raw.partition(b"\n")[0])
            if head["op_id"] > op_id:
                untrained.append(name)
            elif head["corrected_by"] > op_id:
                uncorrected.append(Trained.from_bytes(raw))
        if untrained:
            await self._redis.hdel(self._keys.late_trained, *untrained)
        await self.plan(uncorrected, 0)

    async def forget(self, indices: Iterable[int]) -> None:
        """Drops groups and their final rewards."""
        names = [str(index) for index in indices]
        if names:
            pipe = self._redis.pipeline(transaction=True)
            pipe.hdel(self._keys.late_trained, *names)
            pipe.hdel(self._keys.late_settled, *names)
            await pipe.execute()

    async def token(self) -> str:
        """Where the stream of ladders goes on; its beginning at first."""
        raw = await self._redis.get(self._keys.late_token)
        return raw.decode() if raw else "0-0"

    async def settle(self, rewards: Mapping[int, list[float | None]], token: str) -> None:
        """Keeps final rewards and the place behind them, together."""
        pipe = self._redis.pipeline(transaction=True)
        for index, values in rewards.items():
            pipe.hset(self._keys.late_settled, str(index), json.dumps(values))
        pipe.set(self._keys.late_token, token)
        await pipe.execute()

    async def waiting(self) -> int:
        """Groups whose final rewards are awaited, or wait for their step."""
        return int(await self._redis.hlen(self._keys.late_trained))
