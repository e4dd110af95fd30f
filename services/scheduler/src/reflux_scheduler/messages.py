"""Translates between the scheduler's values and its messages; checks what comes in."""

import math
import re
from collections.abc import Sequence

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_scheduler.explain import Shortage
from reflux_scheduler.job import Event, Job, JobSpec, MemberState, MemberStatus, Report, RoleTemplate
from reflux_scheduler.topology import LEVELS, Domain, Level, Resources, Topology

MAX_TEXT = 256
_ROLE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|PRIVATE|_KEY", re.IGNORECASE)
_DEFAULT_GRACE_SECONDS = 10.0
_MAX_GRACE_SECONDS = 3600.0
_MAX_AMOUNT = 1e15

_MEMBER_STATES: dict[job_pb2.RoleStatus.State.ValueType, MemberState] = {
    job_pb2.RoleStatus.STATE_RUNNING: "running",
    job_pb2.RoleStatus.STATE_RESTARTING: "restarting",
    job_pb2.RoleStatus.STATE_SUCCEEDED: "succeeded",
    job_pb2.RoleStatus.STATE_FAILED: "failed",
    job_pb2.RoleStatus.STATE_STOPPED: "stopped",
}
_STATUS_OF = {state: number for number, state in _MEMBER_STATES.items()}


def parse_job_name(name: str) -> str:
    """The id in "jobs/{job}". Raises InvalidRequest."""
    prefix, _, job_id = name.partition("/")
    if prefix != "jobs" or not job_id or "/" in job_id:
        raise InvalidRequest(f"name = {name[:MAX_TEXT]!r}: write 'jobs/<job>'")
    return job_id


def parse_job(request: pb.CreateJobRequest) -> JobSpec:
    """Checks a CreateJobRequest. Raises InvalidRequest."""
    if not request.request_id or len(request.request_id) > MAX_TEXT:
        raise InvalidRequest("request_id is required: a UUID that stays the same when the call is repeated")
    if not request.roles:
        raise InvalidRequest("roles is empty: a job has at least one role")
    if len(request.display_name) > MAX_TEXT:
        raise InvalidRequest(f"display_name is longer than {MAX_TEXT} characters")
    roles = tuple(_parse_role(role) for role in request.roles)
    return JobSpec(request.display_name, roles, _parse_level("required_level", request.required_level))


def _parse_role(role: job_pb2.RoleSpec) -> RoleTemplate:
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
    return RoleTemplate(
        name=role.role,
        count=role.count,
        each=_parse_resources(key, role.resources),
        argv=tuple(role.argv),
        environment=tuple((entry.name, entry.value) for entry in role.environment),
        max_restarts=role.max_restarts,
        required_level=_parse_level(f"{key}.required_level", role.required_level),
        serves=role.serves,
        stop_grace_seconds=grace or _DEFAULT_GRACE_SECONDS,
    )


def _parse_resources(key: str, resources: common_pb2.Resources) -> Resources:
    gpus, cpus = resources.gpus, resources.cpus
    if not 0 <= gpus <= _MAX_AMOUNT or gpus != int(gpus):
        raise InvalidRequest(f"{key}.resources.gpus = {gpus!r}: whole GPUs only, for example 4")
    if not 0 <= cpus <= _MAX_AMOUNT:
        raise InvalidRequest(f"{key}.resources.cpus = {cpus!r}: zero or more, for example 0.5")
    return Resources(int(gpus), math.ceil(cpus * 1000 - 1e-6), resources.memory_bytes)


def _parse_level(key: str, level: str) -> Level:
    for known in LEVELS:
        if level == known:
            return known
    if not level:
        return "cluster"
    raise InvalidRequest(f"{key} = {level[:MAX_TEXT]!r}: there is no such level; known: {', '.join(LEVELS)}")


def parse_node(topology: Topology, node: str) -> str:
    """The name of a node given by name or full path. Raises InvalidRequest."""
    name = node.rpartition("/")[2]
    if name in topology and node in (name, topology.domains("node")[topology.index_of(name)].label):
        return name
    some = ", ".join(known.name for known in topology.nodes[:5]) + (", ..." if len(topology.nodes) > 5 else "")
    raise InvalidRequest(f"node = {node[:MAX_TEXT]!r}: the topology has no such node; it has {some}")


def parse_report(status: job_pb2.RoleStatus) -> Report:
    """Checks what an agent says about one member. Raises InvalidRequest."""
    state = _MEMBER_STATES.get(status.state)
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
    )


def render_job(job: Job, topology: Topology) -> job_pb2.Job:
    """The message of a job; values of secret variables are left out."""
    paths = _Paths(topology)
    return job_pb2.Job(
        name=job.name,
        display_name=job.spec.display_name,
        state=job_pb2.Job.State.Value(f"STATE_{job.state}"),
        roles=[render_role(role, show_secrets=False) for role in job.spec.roles],
        placements=[
            common_pb2.Placement(
                role=member.role, rank=member.rank, node=paths.of(member.node), gpu_indices=member.gpu_indices
            )
            for member in (job.placement.members if job.placement else ())
        ],
        members=[_render_member(job, member, paths) for member in job.members if member.incarnation],
        message=job.message,
        created_at=job.created_at,
        ended_at=job.ended_at,
        required_level=job.spec.required_level,
        events=render_events(job.events),
        domain="/".join(job.placement.domain) if job.placement else "",
    )


def render_events(events: Sequence[Event]) -> list[job_pb2.JobEvent]:
    """The messages of events."""
    return [
        job_pb2.JobEvent(
            time=event.time, role_id=event.member, kind=event.kind, text=event.text, sequence=event.sequence
        )
        for event in events
    ]


def render_role(role: RoleTemplate, show_secrets: bool = True) -> job_pb2.RoleSpec:
    """The message of a role template."""
    return job_pb2.RoleSpec(
        role=role.name,
        count=role.count,
        resources=render_resources(role.each),
        argv=role.argv,
        environment=[
            job_pb2.EnvironmentVariable(name=name, value=value if show_secrets or not _SECRET.search(name) else "")
            for name, value in role.environment
        ],
        max_restarts=role.max_restarts,
        required_level=role.required_level,
        serves=role.serves,
        stop_grace_seconds=role.stop_grace_seconds,
    )


def render_resources(amount: Resources) -> common_pb2.Resources:
    """The message of an amount."""
    return common_pb2.Resources(gpus=amount.gpus, cpus=amount.millicpus / 1000, memory_bytes=amount.memory_bytes)


def render_shortage(short: Shortage) -> pb.Shortage:
    """The message of a shortage, in GPUs, CPUs or bytes."""
    unit = 1000 if short.resource == "millicpus" else 1
    return pb.Shortage(
        resource="cpus" if short.resource == "millicpus" else short.resource,
        needed=short.needed / unit,
        free=short.available / unit,
        capacity=short.capacity / unit,
        holders=[f"jobs/{holder.job}" for holder in short.holders],
    )


def _render_member(job: Job, member: MemberStatus, paths: "_Paths") -> job_pb2.RoleStatus:
    # A member that waits for its next start has no state of its own on the wire: it will start again.
    state = _STATUS_OF.get(member.state, job_pb2.RoleStatus.STATE_RESTARTING)
    return job_pb2.RoleStatus(
        role_id=job.role_id(member),
        job=job.name,
        pid=member.pid,
        restarts=member.restarts,
        exit_code=member.exit_code,
        state=state,
        rss_bytes=member.rss_bytes,
        node=paths.of(member.node),
        log_path=member.log_path,
        message=member.message,
        revision=member.revision,
        started_at=member.started_at,
    )


class _Paths:
    """Full paths of nodes; a node that the topology has lost keeps its bare name."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._nodes: tuple[Domain, ...] = topology.domains("node")

    def of(self, node: str) -> str:
        return self._nodes[self._topology.index_of(node)].label if node in self._topology else node
