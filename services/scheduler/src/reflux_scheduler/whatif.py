"""Answers what-if questions: the production policy on a copy of the room, with nodes and jobs changed."""

import asyncio
import time
from dataclasses import replace

import numpy as np

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import InvalidRequest, NotFound
from reflux_placement.errors import InvalidGang, InvalidTopology
from reflux_placement.gang import Assignment
from reflux_placement.place.cost import cost
from reflux_placement.place.search import fits_ever
from reflux_placement.policy.cycle import decide
from reflux_placement.policy.view import Action, Ask, Decision, Live, Migrate, NodeState, Preempt, Resize, Start, View
from reflux_placement.policy.view import Replace as ReplaceAction
from reflux_placement.policy.view import Requeue as RequeueAction
from reflux_placement.room import Holding, Room
from reflux_placement.topology import Topology, build_topology
from reflux_scheduler.controller import Controller
from reflux_scheduler.errors import UnknownJob
from reflux_scheduler.ledger import bookings_of, job_of
from reflux_scheduler.parse import parse_job_name, parse_node, parse_spec
from reflux_scheduler.render import render_cost

NEW_JOB = "jobs/new"
_CYCLES = 3
"""Cycles that are looked at: who gets room that another gives back starts in the cycle after."""

_MAX_NODES = 100_000
"""Nodes that one question may add."""


async def what_if(controller: Controller, request: pb.SimulateRequest) -> pb.SimulateResponse:
    """What the policy would do at once, and once those that it stops, shrinks or moves are gone.

    Raises InvalidRequest or NotFound.
    """
    topology = _changed_topology(controller.topology, request)
    view, never = _view(controller, request, topology)
    told: dict[str, pb.SimulatedOutcome] = {}
    if never:
        told[NEW_JOB] = pb.SimulatedOutcome(job=NEW_JOB, outcome="never", sentence=never)
    for _ in range(_CYCLES):
        decision = await asyncio.to_thread(decide, replace(view, room=view.room.copy()), controller.rules.config)
        for action in decision.actions:
            for job in _touched(action):
                if job not in told:
                    told[job] = _outcome(action, view, job)
        waits = decision.waits
        view = _after(view, decision)
        if all(isinstance(action, Start) for action in decision.actions):
            break
    for job, wait in waits.items():
        if job not in told:
            told[job] = pb.SimulatedOutcome(job=job, outcome="waits", sentence=wait.sentence)
    outcomes = list(told.values())
    held = sum(holding.amount.gpus for holding in view.room.holdings.values())
    return pb.SimulateResponse(
        sentence=_sentence(outcomes, request),
        outcomes=outcomes,
        held_gpus=held,
        total_gpus=int(topology.capacity_NR[:, 0].sum()),
    )


def _changed_topology(topology: Topology, request: pb.SimulateRequest) -> Topology:
    if not request.add_nodes:
        return topology
    if len(request.add_nodes) > _MAX_NODES:
        raise InvalidRequest(f"add_nodes: at most {_MAX_NODES} nodes")
    nodes = list(topology.nodes)
    for added in request.add_nodes:
        like = topology.nodes[topology.index_of(parse_node(topology, added.like))]
        nodes.append(replace(like, name=added.name))
    try:
        return build_topology(topology.name, nodes, topology.levels[1:-1])
    except InvalidTopology as error:
        raise InvalidRequest(f"add_nodes: {error}") from None


def _view(controller: Controller, request: pb.SimulateRequest, topology: Topology) -> tuple[View, str]:
    """The present view on the changed cluster, and why the new job would never fit (empty when it would)."""
    now = time.time()
    view = controller.planner.view(now)
    ended = frozenset(_job_name(controller, name) for name in request.end_jobs)
    states = {topology.index_of(controller.topology.nodes[index].name): state for index, state in view.nodes.items()}
    gone: NodeState = "down"
    for name in request.remove_nodes:
        states[topology.index_of(parse_node(controller.topology, name))] = gone
    for name in request.drain_nodes:
        states[topology.index_of(parse_node(controller.topology, name))] = "draining"
    room = _room_on(view.room, topology, ended, controller)
    room.open_N[list(states)] = False
    pending = [ask for ask in view.pending if ask.job not in ended]
    never = ""
    if request.HasField("job"):
        ask = _new_ask(controller, request.job, topology, now)
        misfit = fits_ever(topology, ask.gang)
        never = misfit.sentence if misfit is not None else ""
        pending += [ask] if misfit is None else []
    spares = frozenset(topology.index_of(controller.topology.nodes[index].name) for index in view.spares)
    live = {job: each for job, each in view.live.items() if job not in ended}
    claims = view.claims if topology is controller.topology else ()
    return replace(view, room=room, pending=pending, live=live, nodes=states, spares=spares, claims=claims), never


def _room_on(room: Room, topology: Topology, ended: frozenset[str], controller: Controller) -> Room:
    """The bookings on a topology that has more nodes."""
    if topology is room.topology:
        room.release_all(name for job in ended for name in bookings_of(job))
        return room
    old = room.topology
    at = np.array([topology.index_of(node.name) for node in old.nodes], dtype=np.int64)
    other = Room(topology)
    other.open_N[at] = room.open_N
    for booking, holding in room.holdings.items():
        if job_of(booking) not in ended:
            nodes = {role: at[ranks] for role, ranks in holding.assignment.nodes.items()}
            assignment = Assignment(topology.levels[-1], 0, nodes)
            other.restore(booking, Holding(holding.demand, assignment, at[holding.node_M], holding.gpus_M))
    held_NR = np.zeros_like(room.free_NR)
    for holding in room.holdings.values():
        np.add.at(held_NR, holding.node_M, holding.need_MR)
    # What is neither free nor held by a job is held by others.
    other.free_NR[at] -= old.capacity_NR - room.free_NR - held_NR
    return other


def _new_ask(controller: Controller, request: pb.CreateJobRequest, topology: Topology, now: float) -> Ask:
    try:
        spec = parse_spec(request, topology, frozenset(controller.queues))
        gang = spec.demand()
        gang.check_levels(topology)
    except InvalidGang as error:
        raise InvalidRequest(f"job: {error}") from None
    number = max((job.number for job in controller.book.jobs.values()), default=0) + 1
    return Ask(
        job=NEW_JOB,
        number=number,
        gang=gang,
        submitted_at=now,
        queue=spec.queue,
        priority=spec.priority,
        preemptible=not spec.protected,
        expected_seconds=spec.expected_seconds,
        min_run_seconds=spec.min_run_seconds,
    )


def _job_name(controller: Controller, name: str) -> str:
    try:
        return controller.book.get(parse_job_name(name)).name
    except UnknownJob as error:
        raise NotFound(str(error)) from None


def _touched(action: Action) -> tuple[str, ...]:
    match action:
        case Preempt():
            return action.victims
        case Migrate():
            return tuple(job for job, _ in action.moves)
        case _:
            return (action.job,)


_OUTCOMES: dict[type, str] = {
    Start: "starts",
    Preempt: "preempted",
    Resize: "resized",
    ReplaceAction: "replaced",
    RequeueAction: "requeued",
    Migrate: "migrated",
}


def _outcome(action: Action, view: View, job: str) -> pb.SimulatedOutcome:
    outcome = pb.SimulatedOutcome(job=job, outcome=_OUTCOMES[type(action)], sentence=action.why)
    assignment = _assignment(action, job)
    if assignment is not None:
        outcome.domain = view.room.topology.domains(assignment.level)[assignment.domain].label
        gang = next((ask.gang for ask in view.pending if ask.job == job), None)
        if gang is None and job in view.live:
            gang = view.live[job].ask.gang
        if gang is not None:
            room = view.room.copy()
            room.release(job)
            outcome.cost.CopyFrom(render_cost(cost(room, gang, assignment)))
    return outcome


def _assignment(action: Action, job: str) -> Assignment | None:
    if isinstance(action, Start | Resize | ReplaceAction):
        return action.assignment
    if isinstance(action, Migrate):
        return dict(action.moves)[job]
    return None


def _room_after(view: View, decision: Decision) -> Room:
    """The bookings once everything is carried out."""
    room = view.room
    for action in decision.actions:
        room.release_all(_touched(action))
    gangs = {ask.job: ask.gang for ask in view.pending} | {job: live.ask.gang for job, live in view.live.items()}
    for action in decision.actions:
        for job in _touched(action):
            assignment = _assignment(action, job)
            if assignment is not None and job not in room.holdings:
                room.take(job, gangs[job], assignment)
    return room


def _after(view: View, decision: Decision) -> View:
    """The view once everything is carried out."""
    room, live, asks = _room_after(view, decision), dict(view.live), {ask.job: ask for ask in view.pending}
    for action in decision.actions:
        if isinstance(action, Start):
            live[action.job] = Live(ask=asks.pop(action.job), started_at=view.now, saved_at=view.now)
        elif isinstance(action, Preempt | RequeueAction):
            for job in _touched(action):
                asks[job] = live.pop(job).ask
    pending = sorted(asks.values(), key=lambda ask: ask.number)
    return replace(view, room=room, live=live, pending=pending, claims=decision.claims)


def _sentence(outcomes: list[pb.SimulatedOutcome], request: pb.SimulateRequest) -> str:
    if request.HasField("job"):
        mine = next((each for each in outcomes if each.job == NEW_JOB), None)
        if mine is not None:
            where = f" in {mine.domain}" if mine.domain else ""
            others = sum(each.outcome == "preempted" for each in outcomes)
            after = f"; {others} job(s) would be preempted" if others else ""
            return f"the job {mine.outcome}{where}: {mine.sentence}{after}"
    counts: dict[str, int] = {}
    for each in outcomes:
        counts[each.outcome] = counts.get(each.outcome, 0) + 1
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"jobs afterwards: {told}" if told else "nothing would change"
