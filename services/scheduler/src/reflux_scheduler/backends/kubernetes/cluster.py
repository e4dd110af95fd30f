"""Owns what Node objects say: labels, room, and whether new work may go there. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from reflux_placement.sources.labels import LabelledNode
from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.base import NodeCondition
from reflux_scheduler.backends.kubernetes.names import labels, parse_quantity
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings, Toleration

Object = Mapping[str, Any]


def keep_node(node: Object) -> dict[str, Any]:
    """The parts of a Node that matter; the rest (images, addresses) is most of it."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    return {
        "metadata": {key: metadata[key] for key in ("name", "labels", "deletionTimestamp") if key in metadata},
        "spec": {key: spec[key] for key in ("unschedulable", "taints") if key in spec},
        "status": {key: status[key] for key in ("allocatable", "conditions") if key in status},
    }


def labelled(node: Object, settings: KubernetesSettings) -> LabelledNode:
    """A node with the room that is left after what the settings reserve for daemons."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    millicpus = int(_amount(allocatable, "cpu") * 1000) - settings.reserve_millicpus
    memory_bytes = int(_amount(allocatable, "memory")) - settings.reserve_memory_bytes
    gpus = int(_amount(allocatable, settings.gpu_resource))
    resources = Resources(gpus=gpus, millicpus=max(0, millicpus), memory_bytes=max(0, memory_bytes))
    return LabelledNode(node["metadata"]["name"], resources, node["metadata"].get("labels") or {})


def condition(node: Object, tolerations: Sequence[Toleration], held: Resources = NOTHING) -> NodeCondition:
    """State of a node with `held` by pods that are not ours.

    Down when it is not Ready; draining when it is cordoned, leaves, or has a taint that agents do not tolerate."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((each for each in conditions if each.get("type") == "Ready"), None)
    if ready is None or ready.get("status") != "True":
        why = (ready or {}).get("message") or (ready or {}).get("reason") or "the node has no Ready condition yet"
        return NodeCondition("down", why, held)
    spec = node.get("spec") or {}
    if node["metadata"].get("deletionTimestamp"):
        return NodeCondition("draining", "the node is being deleted", held)
    if spec.get("unschedulable"):
        return NodeCondition("draining", "cordoned", held)
    for taint in spec.get("taints") or ():
        if taint.get("effect") != "PreferNoSchedule" and not any(_tolerates(each, taint) for each in tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            return NodeCondition("draining", f"taint {taint.get('key')}{value}:{taint.get('effect')}", held)
    return NodeCondition("up", "", held)


def keep_foreign(pod: Object) -> dict[str, Any]:
    """Of a pod that is not ours: where it is and what it requests there (nothing once it has ended)."""
    spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
    kept = {"metadata": {"name": pod["metadata"]["name"], "labels": pod["metadata"].get("labels") or {}}, "node": ""}
    if phase not in ("Failed", "Succeeded") and spec.get("nodeName"):
        kept |= {"node": spec["nodeName"], "requests": _pod_requests(spec)}
    return kept


def foreign(pods: Iterable[Object], settings: KubernetesSettings) -> dict[str, Resources]:
    """What pods that are not of this stack hold, by node."""
    ours = labels(settings.stack).items()
    held: dict[str, Resources] = {}
    for pod in pods:
        if pod["node"] and not ours <= pod["metadata"]["labels"].items():
            requests = pod["requests"]
            amount = Resources(
                gpus=int(requests.get(settings.gpu_resource, 0)),
                millicpus=int(requests.get("cpu", 0) * 1000),
                memory_bytes=int(requests.get("memory", 0)),
            )
            held[pod["node"]] = held.get(pod["node"], Resources()) + amount
    return held


def _pod_requests(spec: Object) -> dict[str, Decimal]:
    """What the pod scheduler counts: the containers' sum or the largest init container, whichever is more; sidecars
    (init containers that always restart) and the pod's overhead on top."""
    total: dict[str, Decimal] = {}
    first = spec.get("initContainers") or ()
    sidecars = [each for each in first if each.get("restartPolicy") == "Always"]
    for container in (*(spec.get("containers") or ()), *sidecars):
        for resource, amount in _requests(container).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in first:
        for resource, amount in _requests(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    for resource, amount in (spec.get("overhead") or {}).items():
        total[resource] = total.get(resource, Decimal(0)) + parse_quantity(amount)
    return total


def _requests(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: parse_quantity(amount) for resource, amount in wanted.items()}


def _amount(allocatable: Object, resource: str) -> Decimal:
    return parse_quantity(allocatable.get(resource, "0"))


def _tolerates(toleration: Toleration, taint: Object) -> bool:
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if toleration.key and toleration.key != taint.get("key"):
        return False
    return toleration.operator == "Exists" or (taint.get("value") or "") == toleration.value
