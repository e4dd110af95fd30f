"""How jobs are written to Redis and read back: the Python half of lua/. Pure."""

import hashlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from reflux_sandbox.jobs import (
    REWARDS,
    Claimed,
    Job,
    JobEnd,
    JobSpec,
    State,
    answer_keys,
    content_hash,
    grade_from_json,
    grade_to_json,
    payload_hash,
)

_KEY_LENGTH = 32
_STATES: dict[bytes, State] = {b"queued": "queued", b"parked": "queued", b"running": "running", b"ended": "ended"}


def job_id_of(spec: JobSpec) -> str:
    """The id that a request id stands for within its run; another one each time when there is none."""
    if not spec.request_id:
        return uuid.uuid4().hex
    return hashlib.blake2b(f"{spec.run}\0{spec.request_id}".encode(), digest_size=16).hexdigest()


def queue_of(spec: JobSpec) -> str:
    """Where a job waits."""
    return spec.queue or spec.fidelity


def to_creation(spec: JobSpec, priority_seconds: float) -> dict[str, Any]:
    """The job for `operations.create`; `payload_number` is left to the caller."""
    keys = answer_keys(spec)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    slots = [numbers[key] for key in keys]
    distinct = [spec.answers[slots.index(number)] for number in range(len(numbers))]
    fields: dict[str, Any] = {
        "run": spec.run,
        "verifier": spec.verifier,
        "version": spec.version,
        "fidelity": spec.fidelity,
    }
    optional: dict[str, Any] = {
        "traceparent": spec.traceparent,
        "group": spec.group,
        "policy": spec.policy_version,
        "priority": spec.priority,
        "head_start": round(spec.priority * priority_seconds * 1e6),
        "cost": spec.cost_hint_seconds,
        "samples": _compact(spec.sample_ids) if spec.sample_ids else "",
        "slots": _compact(slots) if len(distinct) < len(slots) else "",
        "token": uuid.uuid4().hex if spec.external else "",
    }
    fields |= {name: value for name, value in optional.items() if value}
    return {
        "id": job_id_of(spec),
        "run": spec.run,
        "group": spec.group,
        "queue": queue_of(spec),
        "keys": "".join(numbers),
        "answers": _compact(distinct),
        "payload": payload_hash(spec.payload),
        "deadline_ms": max(1, round(spec.deadline_seconds * 1000)),
        "head_start_us": round(spec.priority * priority_seconds * 1e6),
        "fields": [str(part) for pair in fields.items() for part in pair],
    }


def to_new_job(creation: Mapping[str, Any], now: float) -> Job:
    """The job that `operations.create` has just queued, as a caller would read it; without another look at Redis."""
    fields = creation["fields"]
    row = dict(zip(fields[::2], fields[1::2], strict=True))
    row |= {"state": "queued", "attempts": "0", "keys": creation["keys"], "created": str(now * 1000)}
    row["deadline"] = str(now * 1000 + creation["deadline_ms"])
    return to_job(creation["id"], {name.encode(): value.encode() for name, value in row.items()}, now)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def to_job(job_id: str, row: Mapping[bytes, bytes], now: float) -> Job:
    """The stored job as a caller sees it; `now` in seconds since 1970."""
    state = _STATES[row[b"state"]]
    keys, slots = _keys_and_slots(row)
    known = {slot: row[name] for slot in set(slots) if (name := b"g%d" % slot) in row}
    rest = row.get(b"rest", b"")
    grades = {number: grade_from_json(known[slot]) for number, slot in enumerate(slots) if slot in known}
    executed = int(row.get(b"executed", 0))
    return Job(
        job_id=job_id,
        run=_text(row, b"run"),
        verifier=_text(row, b"verifier"),
        version=_text(row, b"version"),
        fidelity=_text(row, b"fidelity"),  # type: ignore[arg-type]
        state=state,
        answers=len(slots),
        grades=tuple(grades.get(number) or grade_from_json(rest) for number in range(len(slots)))
        if state == "ended"
        else (),
        partial={} if state == "ended" else grades,
        attempts=int(row[b"attempts"]),
        content_hash=content_hash([keys[slot] for slot in slots]),
        cached=state == "ended" and not rest and not executed,
        error=_text(row, b"error"),
        queue_seconds=_number(row, b"queue_ms") / 1000,
        run_seconds=_number(row, b"run_ms") / 1000,
        priority=_number(row, b"priority"),
        group=_text(row, b"group"),
        policy_version=int(row.get(b"policy", 0)),
        sample_ids=tuple(json.loads(row.get(b"samples", b"[]"))),
        cost_hint_seconds=_number(row, b"cost"),
        cpu_seconds=_number(row, b"cpu"),
        executed=executed,
        progress=_number(row, b"progress"),
        created=_number(row, b"created") / 1000,
        deadline=_number(row, b"deadline") / 1000,
        ended=_number(row, b"ended") / 1000,
        heartbeat_age_seconds=max(0.0, now - _number(row, b"beat") / 1000) if state == "running" else 0.0,
        reason=_text(row, b"reason"),
        token=_text(row, b"token"),
    )


def _keys_and_slots(row: Mapping[bytes, bytes]) -> tuple[list[str], list[int]]:
    text = row[b"keys"].decode()
    keys = [text[start : start + _KEY_LENGTH] for start in range(0, len(text), _KEY_LENGTH)]
    return keys, json.loads(row[b"slots"]) if b"slots" in row else list(range(len(keys)))


def _text(row: Mapping[bytes, bytes], name: bytes) -> str:
    return row.get(name, b"").decode()


def _number(row: Mapping[bytes, bytes], name: bytes) -> float:
    return float(row.get(name, b"0"))


def distinct_numbers(row: Mapping[bytes, bytes]) -> list[int]:
    """Number of the distinct answer that each answer of a stored job is equal to."""
    return _keys_and_slots(row)[1]


def to_claimed(row: Sequence[Any], owner: str) -> Claimed:
    """A row of `operations.claim`."""
    job_id, verifier, payload, answers, run, traceparent, attempt, left_ms, numbers, version = row
    distinct, own = json.loads(answers), json.loads(numbers)
    return Claimed(
        job_id=job_id.decode(),
        owner=owner,
        verifier=verifier.decode(),
        payload=payload.decode(),
        answers=tuple(distinct[number] for number in own),
        numbers=tuple(own),
        run=run.decode(),
        traceparent=traceparent.decode(),
        attempt=int(attempt),
        seconds_left=int(left_ms) / 1000,
        version=version.decode(),
    )


def to_ending(end: JobEnd) -> dict[str, Any]:
    """The end for `operations.finish`."""
    rows = [
        [number, grade_to_json(grade), grade.outcome in REWARDS]
        for number, grade in zip(end.job.numbers, end.grades, strict=False)
    ]
    what = {"outcome": end.outcome, "message": end.message} if end.outcome else {}
    return {
        "id": end.job.job_id,
        "owner": end.job.owner,
        "grades": rows,
        "cpu": end.cpu_seconds,
        "lengths": _length_moments(end),
        **what,
    }


def _length_moments(end: JobEnd) -> dict[str, float]:
    """Sums over the answers whose work ended by a verdict or by the deadline, see report.py."""
    late = end.outcome == "timeout" and end.cpu_seconds > 0  # the deadline may pass before the work begins
    graded = [answer for answer, grade in zip(end.job.answers, end.grades, strict=False) if grade.outcome in REWARDS]
    sizes = [math.log1p(len(answer)) for answer in (end.job.answers if late else graded)]
    if not sizes:
        return {}
    moments = {"n": len(sizes), "x": sum(sizes), "xx": sum(size * size for size in sizes)}
    return moments | ({"t": len(sizes), "xt": sum(sizes)} if late else {})
