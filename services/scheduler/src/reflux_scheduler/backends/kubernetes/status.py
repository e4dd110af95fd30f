"""Owns what a grant's objects mean: waiting, granted with lost nodes, or ended, and why. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from reflux_scheduler.backends.base import GrantStatus
from reflux_scheduler.backends.kubernetes.names import (
    GRANTED_ANNOTATION,
    NODES_ANNOTATION,
    PARTS_ANNOTATION,
)

Object = Mapping[str, Any]
_ENDED_POD = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that the API server has of one grant; at least one workload."""

    grant_id: str
    workloads: Sequence[Object]
    pods: Sequence[Object]
    compute_domains: Sequence[Object]
    nodes: Mapping[str, bool]
    """Nodes that exist, and whether they are ready."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grant's status and what has to be done about it."""

    status: GrantStatus
    newly_granted: bool = False
    """All agents are ready for the first time: write it down before telling anybody."""

    expired: bool = False
    """The start deadline is over: give the room back."""


def judge(seen: Observed, now: float, start_deadline_seconds: float, *, kueue: bool = False) -> Verdict:
    """Status of a grant. Pure; `now` is seconds since 1970 on the API server's clock.

    Part of a gang is never reported as granted: all agents have to be ready and all ComputeDomains Ready at one time.
    A domain can be away for minutes while its pods look healthy (dra-driver#767), hence the deadline with a reason.
    A grant has not ended before its agents have, and a node is not lost before its agent is: its room is not free while
    they stop, and whoever replaces their members must not run beside them.
    """
    native = _native(seen.workloads)
    nodes = nodes_of(seen.workloads[0])
    granted = all(GRANTED_ANNOTATION in _annotations(each) for each in seen.workloads)
    if any(each["metadata"].get("deletionTimestamp") for each in seen.workloads):
        state = "ended" if not _holds(seen) else "granted" if granted else "waiting"
        lost = tuple(_lost(seen, nodes)) if state == "granted" else ()
        return Verdict(GrantStatus(seen.grant_id, state, native, "it is being deleted", lost))
    finished = [why for each in seen.workloads if (why := _finished(each))]
    if granted:
        lost = _lost(seen, nodes)
        told = {**lost, **_leaving(seen, nodes)}
        reason = "; ".join(f"{node}: {why}" for node, why in list(told.items())[:3]) or "; ".join(finished)
        # Not ended when all are lost: the scheduler replaces nodes one by one, also the last one.
        return Verdict(GrantStatus(seen.grant_id, "granted", native, reason, tuple(lost)))
    dead = [_death(pod) for pod in seen.pods if _phase(pod) in _ENDED_POD]
    if finished or dead:
        return Verdict(GrantStatus(seen.grant_id, "ended", native, (dead or finished)[0]))
    why = _wait(seen, nodes, kueue=kueue)
    if not why:
        return Verdict(GrantStatus(seen.grant_id, "granted", native), newly_granted=True)
    begun = _begun(seen, kueue=kueue)
    if begun is not None and now - begun > start_deadline_seconds:
        why = f"not complete after {start_deadline_seconds:g} s: {why}"
        return Verdict(GrantStatus(seen.grant_id, "waiting", native, why), expired=True)
    return Verdict(GrantStatus(seen.grant_id, "waiting", native, why))


def nodes_of(workload: Object) -> tuple[str, ...]:
    """Nodes of the grant that a workload belongs to."""
    return tuple(filter(None, _annotations(workload).get(NODES_ANNOTATION, "").split(",")))


def keep_pod(pod: Object) -> dict[str, Any]:
    """The parts of a pod that matter; its affinity alone can be many kilobytes."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    kept = ("name", "namespace", "labels", "annotations", "creationTimestamp", "deletionTimestamp")
    told = ("phase", "reason", "message", "conditions", "containerStatuses")
    return {
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "spec": {"nodeName": (pod.get("spec") or {}).get("nodeName", "")},
        "status": {key: status[key] for key in told if key in status},
    }


def keep_workload(workload: Object) -> dict[str, Any]:
    """A workload without its pod templates."""
    spec = workload.get("spec") or {}
    return {
        **{key: workload[key] for key in ("apiVersion", "kind") if key in workload},
        "metadata": {key: value for key, value in workload["metadata"].items() if key != "managedFields"},
        "spec": {key: spec[key] for key in ("suspend",) if key in spec},
        "status": workload.get("status") or {},
    }


def _annotations(thing: Object) -> Mapping[str, str]:
    return thing["metadata"].get("annotations") or {}


def _phase(pod: Object) -> str:
    return (pod.get("status") or {}).get("phase", "")


def _node(pod: Object) -> str:
    return (pod.get("spec") or {}).get("nodeName", "")


def _conditions(thing: Object) -> dict[str, Object]:
    return {each["type"]: each for each in (thing.get("status") or {}).get("conditions") or ()}


def _native(workloads: Sequence[Object]) -> str:
    first = workloads[0]
    name = f"{str(first.get('kind') or 'JobSet').lower()} {first['metadata']['name']}"
    return name if len(workloads) == 1 else f"{name} and {len(workloads) - 1} more"


def _finished(workload: Object) -> str:
    """Why a workload has ended; empty while it has not. JobSets have conditions Failed and Completed."""
    conditions = _conditions(workload)
    for kind in ("Failed", "Completed"):
        found = conditions.get(kind)
        if found is not None and found.get("status") == "True":
            return f"{kind}: {found.get('message') or found.get('reason') or 'no reason given'}"
    return ""


def _alive(pod: Object) -> bool:
    return _phase(pod) == "Running" and not pod["metadata"].get("deletionTimestamp")


def _stands(seen: Observed, pod: Object) -> bool:
    """Whether some agent may still be there. On a node that is not ready nobody can tell: there the agent's own lease
    ends its members, and the room is of no use anyway."""
    return _phase(pod) not in _ENDED_POD and seen.nodes.get(_node(pod), False)


def _holds(seen: Observed) -> bool:
    return any(_stands(seen, pod) for pod in seen.pods)


def _stops(seen: Observed, pod: Object) -> bool:
    """Whether an agent was told to stop and may still be at it: for as long as its pod's grace."""
    return _phase(pod) == "Running" and _stands(seen, pod) and bool(pod["metadata"].get("deletionTimestamp"))


def _by_node(pods: Iterable[Object]) -> dict[str, list[Object]]:
    by_node: dict[str, list[Object]] = {}
    for pod in pods:
        by_node.setdefault(_node(pod), []).append(pod)
    return by_node


def _lost(seen: Observed, nodes: Iterable[str]) -> dict[str, str]:
    """Nodes of a granted part without a living agent, and why."""
    by_node = _by_node(seen.pods)
    lost: dict[str, str] = {}
    for node in nodes:
        pods = by_node.get(node, [])
        if node not in seen.nodes:
            lost[node] = "the node is gone"
        elif not any(_alive(pod) or _stops(seen, pod) for pod in pods):
            lost[node] = _death(pods[-1]) if pods else "its agent's pod is gone"
    return lost


def _leaving(seen: Observed, nodes: Iterable[str]) -> dict[str, str]:
    """Nodes of a granted part that are lost once their agents have stopped, and why."""
    stopping = _by_node(pod for pod in seen.pods if _stops(seen, pod))
    alive = {_node(pod) for pod in seen.pods if _alive(pod)}
    return {node: _death(stopping[node][-1]) for node in nodes if node in stopping and node not in alive}


def _death(pod: Object) -> str:
    """One sentence on why a pod has ended or ends."""
    status = pod.get("status") or {}
    why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
    disruption = _conditions(pod).get("DisruptionTarget")
    if not why and disruption is not None:
        why = ": ".join(filter(None, (disruption.get("reason"), disruption.get("message"))))
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended and not why:
            why = f"the agent ended with status {ended.get('exitCode')} ({ended.get('reason') or 'no reason given'})"
    if not why:
        why = "it is being deleted" if pod["metadata"].get("deletionTimestamp") else _phase(pod) or "no phase"
    return f"pod {pod['metadata']['name']}: {why}"


def _wait(seen: Observed, nodes: Sequence[str], *, kueue: bool) -> str:
    """What a grant waits for; empty when all of it is there."""
    expected = int(_annotations(seen.workloads[0]).get(PARTS_ANNOTATION, "1"))
    if len(seen.workloads) < expected:
        return f"{len(seen.workloads)} of {expected} workloads are there"
    if any((each.get("spec") or {}).get("suspend") for each in seen.workloads):
        return "suspended: Kueue has not admitted it" if kueue else "suspended"
    ready = {_node(pod) for pod in seen.pods if _alive(pod) and _is_true(pod, "Ready")}
    missing = [node for node in nodes if node not in ready]
    if missing:
        problem = next(filter(None, map(_problem, seen.pods)), "")
        return f"{len(nodes) - len(missing)} of {len(nodes)} agents are ready" + (f"; {problem}" if problem else "")
    for domain in seen.compute_domains:
        state = (domain.get("status") or {}).get("status") or "without a status"
        if state != "Ready":
            return f"ComputeDomain {domain['metadata']['name']} is {state}"
    return ""


def _is_true(thing: Object, kind: str) -> bool:
    return _conditions(thing).get(kind, {}).get("status") == "True"


def _problem(pod: Object) -> str:
    """What holds a pod up, in the words of scheduler or kubelet."""
    placed = _conditions(pod).get("PodScheduled")
    name = pod["metadata"]["name"]
    if placed is not None and placed.get("status") == "False":
        return f"pod {name}: {placed.get('reason') or 'not placed'}: {placed.get('message') or ''}".rstrip(": ")
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"pod {name}: {waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ")
    return ""


def _begun(seen: Observed, *, kueue: bool) -> float | None:
    """When the start deadline began to count: with Kueue not before there are pods."""
    dated = seen.pods if kueue else seen.workloads
    stamps = [stamp for each in dated if (stamp := each["metadata"].get("creationTimestamp"))]
    return min((parse_time(stamp) for stamp in stamps), default=None)


def parse_time(stamp: str) -> float:
    """Seconds since 1970 of a timestamp of the API, such as 2026-11-30T16:00:00Z."""
    return datetime.fromisoformat(stamp).timestamp()
