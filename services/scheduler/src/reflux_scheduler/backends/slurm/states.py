"""Owns the reading of Slurm's states: jobs as grants, nodes as conditions."""

from collections.abc import Iterable, Mapping, Sequence

from reflux_placement.sources.slurm_nodes import NodeRecord
from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.base import GrantStatus, NodeCondition
from reflux_scheduler.backends.slurm.client import JobRecord
from reflux_scheduler.backends.slurm.job import grant_of, parse_comment

WAITING = frozenset({"PENDING", "CONFIGURING", "RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED"})
RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
COMPLETING = "COMPLETING"
"""It will not run any more, but processes of it may be left on its nodes. Slurm bounds how long that takes."""

HOLDING = RUNNING | {"CONFIGURING", COMPLETING}
"""States of a job that has an allocation."""

_ENDS = {
    "BOOT_FAIL": "its nodes failed to boot",
    "CANCELLED": "cancelled",
    "COMPLETED": "all its agents have ended",
    "DEADLINE": "its deadline has passed",
    "FAILED": "its agents have failed",
    "NODE_FAIL": "a node has failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted by another job of the cluster",
    "REVOKED": "revoked",
    "TIMEOUT": "its time limit is reached",
}

_DOWN_STATES = frozenset({"DOWN", "ERROR", "UNKNOWN", "FUTURE", "BLOCKED"})
_DOWN_FLAGS = frozenset({"NOT_RESPONDING", "INVALID_REG", "POWERING_DOWN"})
_DRAIN_FLAGS = frozenset({"DRAIN", "FAIL", "REBOOT_REQUESTED", "REBOOT_ISSUED", "UNDRAIN"})
_RESERVED_FLAGS = frozenset({"MAINTENANCE", "MAINT", "RESERVED"})


def ended(record: JobRecord) -> bool:
    """Whether nothing of a job is left."""
    return record.state not in WAITING and record.state not in HOLDING


def cancellable(record: JobRecord) -> bool:
    """Whether a job is neither over nor about to be."""
    return not ended(record) and record.state != COMPLETING


def by_grant(records: Iterable[JobRecord]) -> dict[str, list[JobRecord]]:
    """Jobs and components per grant id, oldest first."""
    found: dict[str, list[JobRecord]] = {}
    for record in sorted(records, key=lambda each: each.id):
        found.setdefault(grant_of(record.name), []).append(record)
    return found


def split_duplicates(records: Sequence[JobRecord]) -> tuple[list[JobRecord], list[JobRecord]]:
    """The job of a grant, and later submissions of the same grant, which must not run. `records` are oldest first."""
    kept: dict[str, JobRecord] = {}
    extra: list[JobRecord] = []
    for record in records:
        if kept.setdefault(record.name, record) is not record:
            extra.append(record)
    return list(kept.values()), extra


def grant_status(grant_id: str, records: Sequence[JobRecord]) -> GrantStatus:
    """What the components of one job say together. A component that ended while others run has lost its nodes; a job
    that is ending keeps its room until its last process is gone."""
    native = f"slurm job {records[0].id}"
    over = [record for record in records if ended(record)]
    if len(over) == len(records):
        failed = {node for record in records if record.state == "NODE_FAIL" for node in wanted(record)}
        return GrantStatus(grant_id, "ended", native, _end(over[0]), tuple(sorted(failed)))
    if all(record.state == COMPLETING or ended(record) for record in records):
        return GrantStatus(grant_id, "granted", native, f"completing: {native} is ending")
    waiting = [record for record in records if record.state in WAITING]
    if waiting:
        said = [f"{record.state.lower()}: {record.reason}" for record in waiting if record.reason]
        return GrantStatus(grant_id, "waiting", native, said[0] if said else waiting[0].state.lower())
    lost = {node for record in over for node in wanted(record)}
    for record in records:
        lost |= set(wanted(record)) - (set(record.nodes) if record.state in RUNNING else set())
    said = [_end(record) for record in over] + [r.state.lower() for r in records if r.state in RUNNING - {"RUNNING"}]
    return GrantStatus(grant_id, "granted", native, said[0] if said else "", tuple(sorted(lost)))


def wanted(record: JobRecord) -> tuple[str, ...]:
    """Nodes that a job was submitted for."""
    told = parse_comment(record.comment)
    return told[0] if told is not None else record.asked or record.nodes


def held(records: Iterable[JobRecord]) -> dict[str, Resources]:
    """What our own jobs hold per node, each job counted once."""
    amounts: dict[str, Resources] = {}
    for record in {record.id: record for record in records if record.state in HOLDING}.values():
        told = parse_comment(record.comment)
        for node in record.nodes:
            amounts[node] = amounts.get(node, NOTHING) + (told[1] if told is not None else NOTHING)
    return amounts


def condition(node: NodeRecord, ours: Resources, *, avoid_foreign: bool, reserved_is_ours: bool) -> NodeCondition:
    """Whether new work may go to a node. `ours` is what our jobs hold of it; the rest of its load is foreign."""
    foreign = _positive(node.allocated - ours)
    words = [node.state, *sorted(node.flags & (_DOWN_FLAGS | _DRAIN_FLAGS | _RESERVED_FLAGS))]
    said = "+".join(words).lower() + (f": {node.reason}" if node.reason and node.reason != "none" else "")
    if node.state in _DOWN_STATES or node.flags & _DOWN_FLAGS:
        return NodeCondition("down", said, foreign)
    if node.flags & _DRAIN_FLAGS or (node.flags & _RESERVED_FLAGS and not reserved_is_ours):
        return NodeCondition("draining", said, foreign)
    if foreign != NOTHING and ours == NOTHING and avoid_foreign:
        return NodeCondition("draining", _foreign(foreign, node.capacity), foreign)
    return NodeCondition("up", "", foreign)


def conditions(
    nodes: Iterable[NodeRecord], ours: Mapping[str, Resources], *, avoid_foreign: bool, reserved_is_ours: bool
) -> dict[str, NodeCondition]:
    """Conditions of all nodes by name."""
    return {
        node.name: condition(
            node, ours.get(node.name, NOTHING), avoid_foreign=avoid_foreign, reserved_is_ours=reserved_is_ours
        )
        for node in nodes
    }


def _end(record: JobRecord) -> str:
    cause = _ENDS.get(record.state, "has ended")
    extra = "" if record.reason in ("", "None", record.state) else f", {record.reason}"
    return f"{record.state.lower()}: slurm job {record.id} {cause}{extra}"


def _positive(amount: Resources) -> Resources:
    return Resources(max(0, amount.gpus), max(0, amount.millicpus), max(0, amount.memory_bytes))


def _foreign(foreign: Resources, capacity: Resources) -> str:
    cpus = f"{foreign.millicpus // 1000} of {capacity.millicpus // 1000} CPUs"
    return f"jobs of others hold {foreign.gpus} of {capacity.gpus} GPUs and {cpus}"
