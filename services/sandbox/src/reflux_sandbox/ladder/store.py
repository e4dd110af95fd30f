"""Ladders in Redis: each step of one is one script (`ladders.lua`), so that a crash loses or doubles no event."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import redis.asyncio

from reflux_kit.errors import InvalidRequest, NotFound
from reflux_sandbox.ladder.calibration import Record
from reflux_sandbox.ladder.state import LadderSpec, LadderState
from reflux_sandbox.store import PREFIX

WINDOW = 1024
"""Records of the calibration window."""
_MOST_EVENTS = 100_000
_RUN_SECONDS = 7 * 86_400
"""How long a run's calibration and events are kept after the last step of a ladder of it."""
_LEAST_MEASURED = 8
_TOKEN = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass(frozen=True)
class Stored:
    """A ladder as it is stored; `revision` grows by one with each step."""

    spec: LadderSpec
    state: LadderState
    revision: str


@dataclass(frozen=True)
class RunRow:
    """Counters of a run by name."""

    counters: Mapping[str, float]

    @property
    def trusted(self) -> bool:
        return self.counters.get("trusted", 0.0) == 1.0

    @property
    def newest_version(self) -> int:
        return int(self.counters.get("newest", 0.0))

    def mean_cost(self, declared: float) -> float:
        """CPU seconds of a full verification: the running mean, or what is declared while few were measured."""
        count = self.counters.get("verifications_measured", 0.0)
        return self.counters["cpu_seconds"] / count if count >= _LEAST_MEASURED else declared

    def spent(self, version: int) -> float:
        """CPU seconds of a policy version, open reservations included."""
        return self.counters.get(f"spent:{version}", 0.0)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One step to store."""

    state: LadderState
    events: Sequence[bytes] = ()
    records: Sequence[Record] = ()
    counts: Mapping[str, float]
    trusted: bool | None = None
    """None leaves it as it is."""


class LadderStore:
    """`watching` serves the blocking reads of `events`."""

    def __init__(
        self, client: redis.asyncio.Redis, watching: redis.asyncio.Redis, keep_seconds: int, prefix: str = PREFIX
    ) -> None:
        self._redis: Any = client  # the stubs of redis-py mix sync, async, text and bytes
        self._watching: Any = watching
        self._keep_seconds = keep_seconds
        self._prefix = prefix
        text = resources.files("reflux_sandbox.ladder").joinpath("ladders.lua").read_text()
        self._script: Any = client.register_script(text)

    async def _call(self, operation: str, events: Sequence[bytes] = (), **arguments: Any) -> Any:
        document = {**arguments, "run_seconds": _RUN_SECONDS}
        return await self._script(keys=[self._prefix], args=[operation, json.dumps(document), *events])

    async def create(self, spec: LadderSpec) -> bool:
        """Stores a new ladder; False when it is there already."""
        made = await self._call(
            "create",
            id=spec.ladder_id,
            run=spec.run,
            version=spec.policy_version,
            spec=spec.to_json(),
            state=LadderState().to_json(),
        )
        return made == 1

    async def load(self, ladder_id: str) -> Stored:
        """Raises NotFound for a ladder that never was, or was settled longer ago than it is kept."""
        row = await self._redis.hgetall(self._key(f"ladder:{ladder_id}"))
        if not row:
            raise NotFound(f"there is no ladder {ladder_id!r}; settled ones are kept for {self._keep_seconds} s")
        return Stored(
            LadderSpec.from_json(row[b"spec"]), LadderState.from_json(row[b"state"]), row[b"revision"].decode()
        )

    async def commit(self, stored: Stored, step: Commit) -> bool:
        """Stores a step; False when another one was stored since `stored` was read: nothing has happened then."""
        done = await self._call(
            "commit",
            step.events,
            id=stored.spec.ladder_id,
            run=stored.spec.run,
            revision=stored.revision,
            state=step.state.to_json(),
            records=[json.dumps(asdict(record), separators=(",", ":")) for record in step.records],
            counts=[[name, repr(amount)] for name, amount in step.counts.items() if amount],
            settled=step.state.settled,
            keep_seconds=self._keep_seconds,
            most_events=_MOST_EVENTS,
            most_records=WINDOW,
            **({} if step.trusted is None else {"trusted": int(step.trusted)}),
        )
        return done == 1

    async def close(self, ladder_id: str) -> None:
        """Takes a ladder off the list of those that have work left."""
        await self._call("close", id=ladder_id)

    async def open_ladders(self) -> list[str]:
        """Ids of all ladders that have work left, oldest first."""
        return [each.decode() for each in await self._redis.zrange(self._key("ladders:open"), 0, -1)]

    async def run(self, run: str) -> RunRow:
        """Counters of a run; empty for one without ladders."""
        rows = await self._redis.hgetall(self._key(f"ladders:run:{run}"))
        return RunRow({name.decode(): float(value) for name, value in rows.items()})

    async def window(self, run: str) -> list[Record]:
        """The calibration window, oldest record first."""
        rows = await self._redis.lrange(self._key(f"ladders:window:{run}"), 0, -1)
        return [_record(row) for row in reversed(rows)]

    async def position(self, run: str, resume_token: str) -> str:
        """Where a watcher starts: behind `resume_token`, or behind the newest event when it is empty."""
        if resume_token:
            if not _TOKEN.fullmatch(resume_token):
                raise InvalidRequest(f"resume_token {resume_token[:40]!r} is not one that this service gave out")
            return resume_token
        newest = await self._redis.xrevrange(self._key(f"ladders:events:{run}"), count=1)
        return newest[0][0].decode() if newest else "0-0"

    async def events(self, run: str, position: str, wait_ms: int) -> list[tuple[str, bytes]]:
        """Events of a run behind `position` with their tokens; waits for the first."""
        streams = await self._watching.xread({self._key(f"ladders:events:{run}"): position}, count=256, block=wait_ms)
        return [(token.decode(), fields[b"e"]) for token, fields in (streams[0][1] if streams else [])]

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"


def _record(raw: bytes) -> Record:
    row = json.loads(raw)
    predicted = row.pop("predicted")
    return Record(**row, predicted=tuple(predicted) if predicted else None)
