"""Turns the scheduler's values into messages; values of secret variables are left out of what clients see."""

import functools
import re
from collections.abc import Sequence

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_placement.gang import Relation
from reflux_placement.place.cost import Cost
from reflux_placement.place.misfit import Misfit
from reflux_placement.room import gpu_indices
from reflux_placement.topology import Resources, Topology
from reflux_scheduler.job import Event, Job, MemberStatus, Placement, Seat
from reflux_scheduler.parse import MEMBER_STATES
from reflux_scheduler.spec import RoleTemplate

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|PRIVATE|_KEY", re.IGNORECASE)
MANY_MEMBERS = 5000
_STATUS_OF = {state: number for number, state in MEMBER_STATES.items()} | {"lost": job_pb2.RoleStatus.STATE_STOPPED}


def render_job(job: Job, topology: Topology, *, brief: bool = False) -> job_pb2.Job:
    """The message of a job; `brief` leaves its members out."""
    paths, placement = Paths(topology), job.placement
    seats = list(placement.seats()) if placement is not None and not brief else []
    return job_pb2.Job(
        name=job.name,
        display_name=job.spec.display_name,
        state=job_pb2.Job.State.Value(f"STATE_{job.state}"),
        roles=[render_role(role, show_secrets=False) for role in job.spec.roles],
        placements=_render_places(placement, paths) if placement is not None and not brief else (),
        members=_render_members(job, seats, paths) if job.members else (),
        message=job.message,
        created_at=job.created_at,
        ended_at=job.ended_at,
        required_level=job.spec.required_level,
        events=render_events(job.events),
        domain=placement.domain if placement is not None else "",
        queue=job.spec.queue,
        priority=job.spec.priority,
        protected=job.spec.protected,
        expected_seconds=job.spec.expected_seconds,
        min_run_seconds=job.spec.min_run_seconds,
        preferred_level=job.spec.preferred_level,
        relations=[_render_relation(relation) for relation in job.spec.relations],
        attempt=job.attempt,
        preemptions=job.preemptions,
        requeues=job.requeues,
        grants=_render_grants(job, paths, brief),
        placed_at=job.placed_at,
        running_at=job.running_at,
        saved_at=job.saved_at,
    )


def _render_places(placement: Placement, paths: "Paths") -> list[common_pb2.Placement]:
    indices = functools.lru_cache(maxsize=None)(gpu_indices)
    return [
        common_pb2.Placement(role=places.role, rank=rank, node=paths.of(node), gpu_indices=indices(gpus))
        for places in placement.roles
        for rank, (node, gpus) in enumerate(zip(places.nodes, places.gpus, strict=True))
    ]


def _render_members(job: Job, seats: Sequence[Seat], paths: "Paths") -> list[job_pb2.RoleStatus]:
    """What the members do; of very large gangs only those that do not simply run, or the message would be too large."""
    everyone = len(seats) <= MANY_MEMBERS
    return [
        _render_member(job, seat, status, paths)
        for seat in seats
        if (status := job.members.get(seat.label)) is not None
        and status.incarnation
        and (everyone or status.state != "running")
    ]


def _render_grants(job: Job, paths: "Paths", brief: bool) -> list[job_pb2.JobGrant]:
    if not job.parts or job.placement is None:
        return []
    nodes: dict[int, dict[str, None]] = {part.number: {} for part in job.parts}
    for seat in job.placement.seats() if not brief else ():
        nodes.setdefault(seat.part, {})[paths.of(seat.node)] = None
    return [
        job_pb2.JobGrant(
            id=f"{job.id}-{part.number}",
            state=part.state,
            native=part.native,
            reason=part.reason,
            nodes=list(nodes[part.number]),
        )
        for part in job.parts
    ]


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
    spec = job_pb2.RoleSpec(
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
        preferred_level=role.preferred_level,
        segment_size=role.segment_size,
        segment_level=role.segment_level if role.segment_size else "",
        max_per_domain=role.max_per_domain,
        spread_level=role.spread_level,
        traffic_bytes=role.traffic,
    )
    if role.min_count is not None:
        spec.min_count = role.min_count
    if role.max_count is not None:
        spec.max_count = role.max_count
    return spec


def _render_relation(relation: Relation) -> job_pb2.RoleRelation:
    return job_pb2.RoleRelation(
        role=relation.role,
        near=relation.near,
        level=relation.level,
        preferred=not relation.required,
        traffic_bytes=relation.traffic,
    )


def render_resources(amount: Resources) -> common_pb2.Resources:
    """The message of an amount."""
    return common_pb2.Resources(gpus=amount.gpus, cpus=amount.millicpus / 1000, memory_bytes=amount.memory_bytes)


def render_shortage(misfit: Misfit) -> pb.Shortage:
    """The message of a misfit, in GPUs, CPUs, bytes, members or nodes."""
    unit = 1000 if misfit.resource == "millicpus" else 1
    return pb.Shortage(
        resource="cpus" if misfit.resource == "millicpus" else misfit.resource,
        needed=misfit.needed / unit,
        free=misfit.available / unit,
        capacity=misfit.capacity / unit,
        holders=[holder.job for holder in misfit.holders],
        role=misfit.role,
        constraint=misfit.constraint,
        level=misfit.level,
        domain=misfit.domain,
        fragmented=misfit.fragmented,
    )


def render_cost(cost: Cost) -> pb.PlacementCost:
    """The message of a cost."""
    return pb.PlacementCost(traffic=cost.traffic, fragmentation=cost.fragmentation, total=cost.total)


def _render_member(job: Job, seat: Seat, member: MemberStatus, paths: "Paths") -> job_pb2.RoleStatus:
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
        node=paths.of(seat.node),
        log_path=member.log_path,
        message=member.message,
        revision=member.revision,
        started_at=member.started_at,
        grant=job.grant_id(seat.part),
        attempt=job.attempt,
    )


@functools.lru_cache(maxsize=2)
def _paths_by_name(topology: Topology) -> dict[str, str]:
    return {node.name: topology.path(index) for index, node in enumerate(topology.nodes)}


class Paths:
    """Full paths of nodes; a node that the topology has lost keeps its bare name."""

    def __init__(self, topology: Topology) -> None:
        self._by_name = _paths_by_name(topology)

    def of(self, node: str) -> str:
        """The path of a node name."""
        return self._by_name.get(node, node)
