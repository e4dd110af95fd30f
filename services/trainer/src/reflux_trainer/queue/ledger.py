"""What became of every prompt and every learner operation; proves that each prompt was trained at most once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from reflux_trainer.queue.client import RedisClient
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.queue.records import Group
from reflux_trainer.queue.scripts import Scripts


@dataclass(frozen=True)
class Cursor:
    """Where the loop stands, as far as it is decided: behind the last logged step."""

    step: int = 0
    """Optimizer steps of reinforcement learning."""
    warmup_step: int = 0
    op_id: int = 0
    """Last logged learner operation."""
    next_prompt_index: int = 0
    """First prompt that was never issued."""
    low_water_index: int = 0
    """All prompts below are closed: trained, filtered or dead."""
    base_index: int = 0
    """Prompts below were closed before this Redis knew the run (resumed from a checkpoint)."""
    base_step: int = 0
    """Steps done before this Redis knew the run."""
    trimmed_op_id: int = 0
    """Operations up to this one are covered by a checkpoint and forgotten."""

    @classmethod
    def from_hash(cls, raw: dict[bytes, bytes]) -> Self:
        names = {field.name for field in fields(cls)}
        return cls(**{key.decode(): int(value) for key, value in raw.items() if key.decode() in names})


@dataclass(frozen=True)
class Audit:
    """Counts of prompts by state, and everything that breaks "each prompt at most once"."""

    counts: dict[str, int]
    violations: list[str]


class Ledger:
    """Cursor, operation log and prompt states of one run."""

    def __init__(self, redis: RedisClient, run: str, attempt: int) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._keys = RunKeys(run)
        self._attempt = attempt

    async def begin(self, first: Cursor) -> Cursor:
        """Fences older attempts; sets `first` when Redis has no cursor, and returns the present one."""
        arguments: list[Any] = [self._attempt]
        for name, value in asdict(first).items():
            arguments += [name, value]
        await self._scripts.run("begin", [self._keys.cursor], arguments)
        return await self.cursor()

    async def cursor(self) -> Cursor:
        """The stored cursor; all zero when there is none."""
        return Cursor.from_hash(await self._redis.hgetall(self._keys.cursor))

    async def log_step(self, cursor: Cursor, operations: Sequence[bytes], groups: Sequence[Group]) -> Cursor:
        """Decides a step before the learner hears of it: `cursor` is the state behind it, `groups` are its prompts.

        Returns `cursor` with the operation ids counted. Raises Fenced; a gap or a prompt that is not free is a bug.
        """
        cursor = replace(cursor, op_id=cursor.op_id + len(operations))
        changed = {"step": cursor.step, "warmup_step": cursor.warmup_step, "low_water_index": cursor.low_water_index}
        arguments: list[Any] = [self._attempt, cursor.op_id - len(operations) + 1, len(operations), *operations]
        arguments += [len(changed), *(part for pair in changed.items() for part in pair), f"trained@{cursor.step}"]
        for group in groups:
            arguments += [group.index, group.entry]
        keys = self._keys
        await self._scripts.run("log_step", [keys.cursor, keys.ledger, keys.groups, keys.operations], arguments)
        return cursor

    async def operations(self, after: int, up_to: int) -> list[tuple[int, bytes]]:
        """Logged operations with ids in (after, up_to]. Raises LookupError when one of them is gone."""
        ids = list(range(after + 1, up_to + 1))
        if not ids:
            return []
        found = await self._redis.hmget(self._keys.operations, [str(op_id) for op_id in ids])
        missing = [op_id for op_id, payload in zip(ids, found, strict=True) if payload is None]
        if missing:
            raise LookupError(f"learner operations {missing[0]} to {missing[-1]} are not in the log any more")
        return list(zip(ids, found, strict=True))

    async def trim(self, op_id: int) -> None:
        """Forgets operations up to `op_id`: a committed checkpoint covers them."""
        await self._scripts.run("trim", [self._keys.cursor, self._keys.operations], [op_id])

    async def states(self) -> dict[int, str]:
        """State of each prompt that this Redis has seen."""
        raw = await self._redis.hgetall(self._keys.ledger)
        return {int(index): state.decode() for index, state in raw.items()}

    async def audit(self, groups_per_step: int) -> Audit:
        """Counts and violations; run it when the loop stands still."""
        return audit(await self.states(), await self.cursor(), groups_per_step)

    async def dead_letters(self) -> list[tuple[int, str]]:
        """Index and error of each dead letter."""
        entries = await self._redis.xrange(self._keys.dead)
        return [(int(fields[b"i"]), fields[b"error"].decode(errors="replace")) for _entry, fields in entries]

    async def expire(self, seconds: int) -> None:
        """Lets the queue of an ended run go after `seconds`; record and events stay."""
        pipe = self._redis.pipeline(transaction=False)
        for key in self._keys.queue():
            pipe.expire(key, seconds)
        await pipe.execute()


def audit(states: dict[int, str], cursor: Cursor, groups_per_step: int) -> Audit:
    """Pure half of `Ledger.audit`."""
    counts = Counter(state.partition("@")[0] for state in states.values())
    steps = Counter(int(state.partition("@")[2]) for state in states.values() if state.startswith("trained@"))
    violations = [
        f"prompt {index} was never issued, later ones were"
        for index in range(cursor.base_index, cursor.next_prompt_index)
        if index not in states
    ]
    violations += [
        f"prompt {index} is {state}, but the loop is past it"
        for index, state in sorted(states.items())
        if index < cursor.low_water_index and state in ("issued", "emitted")
    ]
    violations += [
        f"step {step} trained {steps[step]} prompts instead of {groups_per_step}"
        for step in range(cursor.base_step + 1, cursor.step + 1)
        if steps[step] != groups_per_step
    ]
    violations += [f"a prompt is marked for step {step}, which is not done" for step in steps if step > cursor.step]
    return Audit(dict(counts), violations)
