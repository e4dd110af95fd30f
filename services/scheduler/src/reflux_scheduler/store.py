"""Owns the scheduler's keys in Redis: jobs and their members, queue order, requests, drained nodes, node health.

All keys share the hash tag {scheduler}, so that one script can touch them on a Redis cluster. Every write goes through
one script that first compares the lease of the leader: what a scheduler writes that lost it changes nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from reflux_scheduler.errors import NotLeading
from reflux_scheduler.job import Job, MemberStatus

REQUEST_SECONDS = 86400
"""A request id is remembered for one day (the proto says so)."""

LEADER = "{scheduler}:leader"
TERM = "{scheduler}:term"
_ORDER = "{scheduler}:jobs"
_DRAINS = "{scheduler}:drains"
_HEALTH = "{scheduler}:health"
_CLAIMS = "{scheduler}:claims"
_job_codec: TypeAdapter[Job] = TypeAdapter(Job)
_member_codec: TypeAdapter[MemberStatus] = TypeAdapter(MemberStatus)

STILL_MINE = """
local held = redis.call('GET', KEYS[1])
if not held and redis.call('GET', KEYS[2]) == string.match(ARGV[1], '^%d+') then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  held = ARGV[1]
end
"""
"""A lease that has run out is still good while nobody else has led since: the term counter says so. KEYS: leader, term;
ARGV: the lease, its length in milliseconds."""

_WRITE = f"""
{STILL_MINE}
if held ~= ARGV[1] then return 0 end
if ARGV[3] ~= '' then
  local known = redis.call('GET', ARGV[3])
  if known then return known end
end
local at = 4
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end
return 1
"""
"""ARGV goes on with a key that must not exist yet (its value is the answer then; empty for none), and with commands,
each behind its number of words. All of them happen or none."""

_WRITE_SHA = hashlib.sha1(_WRITE.encode(), usedforsecurity=False).hexdigest()
_MAX_WORDS = 4000
"""Lua's stack bounds what one command may have: longer ones are split."""

Command = Sequence[str | bytes | int | float]


class Store:
    """Jobs as JSON, their members as a hash beside it, so that a gang of thousands is not written at each report.

    Writes are idempotent: the client may repeat one after a broken connection. They raise NotLeading when `lease` is
    not the stored one.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.lease = ""
        """The value of the leader key while this scheduler leads."""

        self.lease_millis = 10_000

    async def confirm(self) -> None:
        """Returns when this scheduler still leads; for calls that no script can fence. Raises NotLeading."""
        await self._write(())

    async def load(self) -> tuple[list[Job], list[str]]:
        """All stored jobs, oldest first, and the ids of those that cannot be read (another version wrote them)."""
        ids = [_text(raw) for raw in await self._redis.zrange(_ORDER, 0, -1)]
        jobs: list[Job] = []
        unreadable: list[str] = []
        for start in range(0, len(ids), 200):
            batch = ids[start : start + 200]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for job_id in batch:
                    pipeline.get(_job_key(job_id))
                    pipeline.hvals(_members_key(job_id))
                answers = await pipeline.execute()
            for position, job_id in enumerate(batch):
                head, members = answers[2 * position : 2 * position + 2]
                try:
                    if head is not None:
                        jobs.append(_decoded(head, members))
                except ValidationError:
                    unreadable.append(job_id)
        return jobs, unreadable

    async def find(self, job_id: str) -> Job | None:
        """One stored job; None when there is none, or none that can be read."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.get(_job_key(job_id))
            pipeline.hvals(_members_key(job_id))
            head, members = await pipeline.execute()
        try:
            return None if head is None else _decoded(head, members)
        except ValidationError:
            return None

    async def create(self, job: Job, request_id: str) -> str:
        """Stores a new job together with its request id; the id of the job that the request has made, now or before."""
        key = _request_key(request_id)
        commands = [
            *_job_commands(job, None),
            ("ZADD", _ORDER, job.number, job.id),
            ("SET", key, job.id, "EX", REQUEST_SECONDS),
        ]
        known = await self._write(commands, unless=key)
        return known or job.id

    async def save(self, changes: Iterable[tuple[Job | None, Job]]) -> None:
        """Stores changed jobs, all of them or none: pairs of what was stored before (None: not known) and
        what is to be stored."""
        commands: list[Command] = []
        for before, after in changes:
            commands += _job_commands(after, before)
        await self._write(commands)

    async def forget(self, job_id: str) -> None:
        """Drops a job."""
        await self._write([("DEL", _job_key(job_id), _members_key(job_id)), ("ZREM", _ORDER, job_id)])

    async def drains(self) -> dict[str, str]:
        """Drained nodes and why."""
        return {_text(node): _text(why) for node, why in (await self._redis.hgetall(_DRAINS)).items()}

    async def set_drain(self, node: str, why: str | None) -> None:
        """Notes that a node is drained; None opens it again."""
        await self._write([("HDEL", _DRAINS, node) if why is None else ("HSET", _DRAINS, node, why)])

    async def health(self) -> dict[str, dict[str, bool | int | float]]:
        """What is remembered of nodes, in the plain form of the policy."""
        return {_text(node): json.loads(value) for node, value in (await self._redis.hgetall(_HEALTH)).items()}

    async def set_health(self, health: Mapping[str, Mapping[str, bool | int | float]]) -> None:
        """Notes what is remembered of some nodes."""
        if health:
            await self._write([("HSET", _HEALTH, node, json.dumps(value)) for node, value in health.items()])

    async def claims(self) -> str:
        """Room that is kept for jobs, as text."""
        raw = await self._redis.get(_CLAIMS)
        return _text(raw) if raw is not None else "[]"

    async def set_claims(self, text: str) -> None:
        """Notes which room is kept for jobs."""
        await self._write([("SET", _CLAIMS, text)])

    async def _write(self, commands: Sequence[Command], unless: str = "") -> str:
        """Runs commands; when the key `unless` exists, none of them, and its value is the answer."""
        words: list[str | bytes | int | float] = [self.lease, self.lease_millis, unless]
        for command in commands:
            words.append(len(command))
            words.extend(command)
        try:
            done = await self._redis.evalsha(_WRITE_SHA, 2, LEADER, TERM, *words)  # pyright: ignore[reportGeneralTypeIssues]
        except NoScriptError:
            done = await self._redis.eval(_WRITE, 2, LEADER, TERM, *words)  # pyright: ignore[reportGeneralTypeIssues]
        if not done:
            raise NotLeading("")
        return _text(done) if isinstance(done, bytes) else ""


def _job_commands(after: Job, before: Job | None) -> list[Command]:
    commands: list[Command] = [("SET", _job_key(after.id), _job_codec.dump_json(replace(after, members={})))]
    old = before.members if before is not None else {}
    if after.members is old:
        return commands
    gone = [label for label in old if label not in after.members]
    new = [label for label, status in after.members.items() if old.get(label) is not status]
    key = _members_key(after.id)
    if before is None:
        commands.append(("DEL", key))
    for start in range(0, len(gone), _MAX_WORDS):
        commands.append(("HDEL", key, *gone[start : start + _MAX_WORDS]))
    for start in range(0, len(new), _MAX_WORDS // 2):
        pairs: list[str | bytes] = []
        for label in new[start : start + _MAX_WORDS // 2]:
            pairs += [label, _member_codec.dump_json(after.members[label])]
        commands.append(("HSET", key, *pairs))
    return commands


def _decoded(head: bytes, members: Sequence[bytes]) -> Job:
    statuses = [_member_codec.validate_json(raw) for raw in members]
    return replace(_job_codec.validate_json(head), members={status.label: status for status in statuses})


def _text(raw: object) -> str:
    assert isinstance(raw, bytes), "the kit opens Redis without decoding"
    return raw.decode()


def _job_key(job_id: str) -> str:
    return f"{{scheduler}}:job:{job_id}"


def _members_key(job_id: str) -> str:
    return f"{{scheduler}}:members:{job_id}"


def _request_key(request_id: str) -> str:
    return f"{{scheduler}}:request:{request_id}"
