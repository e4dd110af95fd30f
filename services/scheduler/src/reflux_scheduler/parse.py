"""Checks messages that come in and turns them into the scheduler's values."""

import math
import re

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_placement.gang import Relation
from reflux_placement.policy.view import DEFAULT_QUEUE
from reflux_placement.topology import CLUSTER, Resources, Topology
from reflux_scheduler.job import MemberState, Report
from reflux_scheduler.spec import JobSpec, RoleTemplate

MAX_TEXT = 256
_ROLE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GRANT = re.compile(r"[a-z0-9]{1,32}-\d{1,9}")
_DEFAULT_GRACE_SECONDS = 10.0
_MAX_GRACE_SECONDS = 3600.0
_MAX_SECONDS = 1e9
_MAX_AMOUNT = 1e15
MAX_MEMBERS = 50_000
"""A job of this size still fits into one message of 4 MiB with its placements."""

MEMBER_STATES: dict[job_pb2.RoleStatus.State.ValueType, MemberState] = {
    job_pb2.RoleStatus.STATE_RUNNING: "running",
    job_pb2.RoleStatus.STATE_RESTARTING: "restarting",
    job_pb2.RoleStatus.STATE_SUCCEEDED: "succeeded",
    job_pb2.RoleStatus.STATE_FAILED: "failed",
    job_pb2.RoleStatus.STATE_STOPPED: "stopped",
}


def parse_job_name(name: str) -> str:
    """The id in "jobs/{job}". Raises InvalidRequest."""
    prefix, _, job_id = name.partition("/")
    if prefix != "jobs" or not job_id or "/" in job_id:
        raise InvalidRequest(f"name = {name[:MAX_TEXT]!r}: write 'jobs/<job>'")
    return job_id


def parse_request_id(request_id: str) -> str:
    """A request id. Raises InvalidRequest."""
    if not request_id or len(request_id) > MAX_TEXT:
        raise InvalidRequest("request_id is required: a UUID that stays the same when the call is repeated")
    return request_id


def parse_spec(request: pb.CreateJobRequest, topology: Topology, queues: frozenset[str]) -> JobSpec:
    """Checks what a CreateJobRequest asks for. Raises InvalidRequest."""
    if not request.roles:
        raise InvalidRequest("roles is empty: a job has at least one role")
    if len(request.display_name) > MAX_TEXT:
        raise InvalidRequest(f"display_name is longer than {MAX_TEXT} characters")
    queue = request.queue or DEFAULT_QUEUE
    if queue not in queues:
        raise InvalidRequest(f"queue = {queue[:MAX_TEXT]!r}: there is no such queue; known: {_some(sorted(queues))}")
    members = sum(max(role.count, role.max_count) for role in request.roles)
    if members > MAX_MEMBERS:
        raise InvalidRequest(f"roles.count: {members} members in all; a gang has at most {MAX_MEMBERS}")
    levels = _Levels(topology)
    return JobSpec(
        display_name=request.display_name,
        roles=tuple(_parse_role(role, levels) for role in request.roles),
        required_level=levels.parse("required_level", request.required_level, CLUSTER),
        preferred_level=levels.parse("preferred_level", request.preferred_level, ""),
        relations=tuple(_parse_relation(relation, levels) for relation in request.relations),
        queue=queue,
        priority=request.priority,
        protected=request.protected,
        expected_seconds=_amount("expected_seconds", request.expected_seconds, _MAX_SECONDS),
        min_run_seconds=_amount("min_run_seconds", request.min_run_seconds, _MAX_SECONDS),
    )


def _parse_role(role: job_pb2.RoleSpec, levels: "_Levels") -> RoleTemplate:
    if not _ROLE_NAME.fullmatch(role.role):
        raise InvalidRequest(f"roles.role = {role.role[:MAX_TEXT]!r}: use lower-case letters, digits, '_' and '-'")
    key = f"roles[{role.role}]"
    if not role.argv or not role.argv[0] or any("\0" in word for word in role.argv):
        raise InvalidRequest(f"{key}.argv: name a program; no argument holds a zero byte")
    for entry in role.environment:
        if not _VARIABLE.fullmatch(entry.name) or "\0" in entry.value:
            raise InvalidRequest(f"{key}.environment = {entry.name[:MAX_TEXT]!r}: is not a variable")
    grace = role.stop_grace_seconds
    if not math.isfinite(grace) or not 0 <= grace <= _MAX_GRACE_SECONDS:
        raise InvalidRequest(f"{key}.stop_grace_seconds = {grace!r}: 0 (default) to {_MAX_GRACE_SECONDS:g}")
    for name in ("count", "min_count", "max_count", "segment_size", "max_per_domain"):
        if getattr(role, name) > MAX_MEMBERS:
            raise InvalidRequest(f"{key}.{name} = {getattr(role, name)}: at most {MAX_MEMBERS}")
    segmented = role.segment_size > 0
    return RoleTemplate(
        name=role.role,
        count=role.count,
        each=_parse_resources(key, role.resources),
        argv=tuple(role.argv),
        environment=tuple((entry.name, entry.value) for entry in role.environment),
        max_restarts=role.max_restarts,
        required_level=levels.parse(f"{key}.required_level", role.required_level, CLUSTER),
        serves=role.serves,
        stop_grace_seconds=grace or _DEFAULT_GRACE_SECONDS,
        min_count=role.min_count if role.HasField("min_count") else None,
        max_count=role.max_count if role.HasField("max_count") else None,
        preferred_level=levels.parse(f"{key}.preferred_level", role.preferred_level, ""),
        segment_size=role.segment_size,
        segment_level=levels.parse(f"{key}.segment_level", role.segment_level or "rack", "rack")
        if segmented
        else "rack",
        max_per_domain=role.max_per_domain,
        spread_level=levels.parse(f"{key}.spread_level", role.spread_level, ""),
        traffic=_amount(f"{key}.traffic_bytes", role.traffic_bytes, _MAX_AMOUNT),
    )


def _parse_relation(relation: job_pb2.RoleRelation, levels: "_Levels") -> Relation:
    key = f"relations[{relation.role[:MAX_TEXT]} near {relation.near[:MAX_TEXT]}]"
    return Relation(
        role=relation.role,
        near=relation.near,
        level=levels.parse(f"{key}.level", relation.level, ""),
        required=not relation.preferred,
        traffic=_amount(f"{key}.traffic_bytes", relation.traffic_bytes, _MAX_AMOUNT),
    )


def _parse_resources(key: str, resources: common_pb2.Resources) -> Resources:
    gpus, cpus = resources.gpus, resources.cpus
    if not 0 <= gpus <= _MAX_AMOUNT or gpus != int(gpus):
        raise InvalidRequest(f"{key}.resources.gpus = {gpus!r}: whole GPUs only, for example 4")
    if not 0 <= cpus <= _MAX_AMOUNT:
        raise InvalidRequest(f"{key}.resources.cpus = {cpus!r}: zero or more, for example 0.5")
    if resources.memory_bytes > _MAX_AMOUNT:
        raise InvalidRequest(f"{key}.resources.memory_bytes = {resources.memory_bytes}: at most {_MAX_AMOUNT:g}")
    return Resources(int(gpus), math.ceil(cpus * 1000 - 1e-6), resources.memory_bytes)


def _amount(key: str, value: float, most: float) -> float:
    if not 0 <= value <= most:
        raise InvalidRequest(f"{key} = {value!r}: 0 to {most:g}")
    return value


class _Levels:
    def __init__(self, topology: Topology) -> None:
        self._known = topology.levels

    def parse(self, key: str, level: str, default: str) -> str:
        """A level that exists; a constraint at an unknown one is never dropped. Raises InvalidRequest."""
        if not level:
            return default
        if level in self._known:
            return level
        raise InvalidRequest(f"{key} = {level[:MAX_TEXT]!r}: there is no such level; known: {', '.join(self._known)}")


def parse_node(topology: Topology, node: str) -> str:
    """The name of a node given by name or full path. Raises InvalidRequest."""
    name = node.rpartition("/")[2]
    if name in topology and node in (name, topology.path(topology.index_of(name))):
        return name
    some = _some([known.name for known in topology.nodes[:6]])
    raise InvalidRequest(f"node = {node[:MAX_TEXT]!r}: the topology has no such node; it has {some}")


def parse_grant(grant: str) -> str:
    """A grant id, or "". Raises InvalidRequest."""
    if grant and not _GRANT.fullmatch(grant):
        raise InvalidRequest(f"grant = {grant[:MAX_TEXT]!r}: write '<job>-<part>', or nothing for the node's own agent")
    return grant


def parse_report(status: job_pb2.RoleStatus) -> Report:
    """Checks what an agent says about one member. Raises InvalidRequest."""
    state = MEMBER_STATES.get(status.state)
    if state is None or not status.role_id:
        raise InvalidRequest(f"roles: role_id {status.role_id[:MAX_TEXT]!r} has no known state")
    return Report(
        role_id=status.role_id,
        state=state,
        pid=status.pid,
        restarts=status.restarts,
        exit_code=status.exit_code,
        rss_bytes=status.rss_bytes,
        log_path=status.log_path,
        message=status.message,
        revision=status.revision,
        started_at=status.started_at,
        attempt=status.attempt,
    )


def parse_token(field: str, token: str) -> int | None:
    """A page or resume token; None when it is empty. Raises InvalidRequest."""
    if not token:
        return None
    if len(token) > 18 or not (token.isascii() and token.isdigit()):
        raise InvalidRequest(f"{field} = {token[:64]!r}: pass on a token of an answer before, or leave it empty")
    return int(token)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
