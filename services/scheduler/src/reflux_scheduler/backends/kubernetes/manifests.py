"""Owns how a grant is written for the API server: workloads of agents, their Secret, their ComputeDomains. Pure."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reflux_placement.sources.labels import NVLINK_CLIQUE, domain_name
from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import AgentLaunch, Grant, GrantRefused, NodeShare
from reflux_scheduler.backends.kubernetes import kueue, names
from reflux_scheduler.backends.kubernetes.pods import AgentPod, Manifest, pod_template
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

Labels = Mapping[str, Mapping[str, str]]
"""Labels of every node, by node name."""

_JOBSET_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_NOT_PASSED = frozenset({"REFLUX_ADVERTISE_HOST", "REFLUX_STATE_DIR"})
"""They say where the scheduler is; agents are somewhere else."""

_LWS_EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"


@dataclass(frozen=True, slots=True)
class Bundle:
    """All objects of a grant. Workloads come first: they own the others, which go when the workloads go."""

    workloads: tuple[Manifest, ...]
    dependents: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes of a grant whose pods are equal: one shape, one NVLink domain where that matters."""

    resources: Resources
    clique: str
    exclusive: str
    nodes: tuple[str, ...]
    claim_template: str = ""


def render(grant: Grant, launch: AgentLaunch, settings: KubernetesSettings, labels: Labels) -> Bundle:
    """Objects that give exactly the grant's nodes, one agent each; `labels` has all of them.

    With Kueue all shapes of nodes are pod sets of one JobSet, so that they are admitted together. Without it every
    shape is a JobSet of its own: a JobSet fails, and takes the living along, as soon as one of its jobs has failed, and
    a job fails when its last node is lost.

    Raises:
        GrantRefused: a node that is named twice or shares its host name; more shapes than Kueue takes.
    """
    _check(grant, labels)
    base = names.base_name(settings.stack, grant.id)
    groups, domains = _with_claims(base, _groups(grant.shares, settings, labels), settings)
    pods = [_pod(grant, group, base, settings, labels) for group in groups]
    together = bool(settings.kueue_queue) and settings.workload == "jobset"
    if settings.kueue_queue and len(groups) > settings.kueue_max_pod_sets:
        limit = settings.kueue_max_pod_sets
        raise GrantRefused(f"grant {grant.id} has {len(groups)} shapes of nodes; this Kueue takes {limit} pod sets")
    parts = [list(zip(groups, pods, strict=True))] if together else [[each] for each in zip(groups, pods, strict=True)]
    workloads: list[Manifest] = []
    for index, part in enumerate(parts):
        metadata = _metadata(grant, settings, base if len(parts) == 1 else f"{base}-{index}", len(parts))
        if settings.workload == "jobset":
            workloads.append(_jobset(metadata, part, launch, settings))
        else:
            workloads.append(_leader_worker_set(metadata, part[0][1], launch, settings))
    dependents = [
        _secret(grant, launch, settings, base),
        *(_compute_domain(grant, settings, *each) for each in domains),
    ]
    return Bundle(tuple(workloads), tuple(dependents))


def owned_by(manifest: Manifest, owners: Sequence[Manifest]) -> Manifest:
    """The manifest with references to owners as the API server returned them; it goes when the last of them goes."""
    references = [
        {key: owner[key] for key in ("apiVersion", "kind")} | {key: owner["metadata"][key] for key in ("name", "uid")}
        for owner in owners
    ]
    return manifest | {"metadata": manifest["metadata"] | {"ownerReferences": references}}


def _check(grant: Grant, labels: Labels) -> None:
    hosts: dict[str, str] = {}
    for share in grant.shares:
        host = labels[share.node].get(names.HOSTNAME, share.node)
        if host in hosts:
            raise GrantRefused(f"nodes {hosts[host]} and {share.node} of grant {grant.id} share the host name {host}")
        hosts[host] = share.node
    if not hosts:
        raise GrantRefused(f"grant {grant.id} names no node")


def _groups(shares: Sequence[NodeShare], settings: KubernetesSettings, labels: Labels) -> list[_Group]:
    nodes_of: dict[tuple[Resources, str, str], list[str]] = {}
    for share in shares:
        mine = labels[share.node]
        clique = domain_name(mine.get(NVLINK_CLIQUE, "")) if settings.imex and share.resources.gpus else ""
        exclusive = mine.get(settings.exclusive_key, "") if settings.exclusive_key else ""
        nodes_of.setdefault((share.resources, clique, exclusive), []).append(share.node)
    return [_Group(*key, tuple(nodes)) for key, nodes in nodes_of.items()]


def _with_claims(
    base: str, groups: Sequence[_Group], settings: KubernetesSettings
) -> tuple[list[_Group], list[tuple[str, int]]]:
    """The groups with their claims, and (name, nodes) of a ComputeDomain per NVLink domain with several nodes."""
    sizes: dict[str, int] = {}
    for group in groups:
        if settings.imex and group.clique:
            sizes[group.clique] = sizes.get(group.clique, 0) + len(group.nodes)
    wanted = {clique: size for clique, size in sizes.items() if size > 1}
    name_of = {clique: f"{base}-nvl-{index}" for index, clique in enumerate(wanted)}
    claimed = [replace(group, claim_template=name_of.get(group.clique, "")) for group in groups]
    return claimed, [(name_of[clique], size) for clique, size in wanted.items()]


def _pod(grant: Grant, group: _Group, base: str, settings: KubernetesSettings, labels: Labels) -> AgentPod:
    of_nodes = [labels[node] for node in group.nodes]
    annotations = {names.GRANT_ANNOTATION: grant.id}
    if settings.kueue_queue:
        annotations |= kueue.topology_annotations(settings.kueue_levels, of_nodes)
    return AgentPod(
        grant_id=grant.id,
        hostnames=tuple(mine.get(names.HOSTNAME, node) for mine, node in zip(of_nodes, group.nodes, strict=True)),
        resources=group.resources,
        secret=base,
        labels=_labels(grant, settings),
        annotations=annotations,
        claim_template=group.claim_template,
    )


def _labels(grant: Grant, settings: KubernetesSettings) -> dict[str, str]:
    mine = {
        names.GRANT_LABEL: names.label_value(grant.id),
        names.JOB_LABEL: names.label_value(grant.job_id),
    }
    return names.labels(settings.stack) | mine


def _metadata(grant: Grant, settings: KubernetesSettings, name: str, num_workloads: int) -> Manifest:
    labels = _labels(grant, settings)
    if settings.kueue_queue:
        labels[kueue.QUEUE_LABEL] = settings.kueue_queue
    annotations = {
        names.GRANT_ANNOTATION: grant.id,
        names.NODES_ANNOTATION: ",".join(share.node for share in grant.shares),
        names.PARTS_ANNOTATION: str(num_workloads),
        names.DISPLAY_ANNOTATION: grant.display_name,
        names.DOMAIN_ANNOTATION: grant.domain,
    }
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": labels,
        "annotations": {key: value for key, value in annotations.items() if value},
    }


def _jobset(
    metadata: Manifest, groups: Sequence[tuple[_Group, AgentPod]], launch: AgentLaunch, settings: KubernetesSettings
) -> Manifest:
    """A JobSet, suspended until its Secret is there (or until Kueue admits it).

    A lost agent must not end the others, so failures are counted per index and no index is tried again.
    """
    jobs: list[Manifest] = []
    for index, (group, pod) in enumerate(groups):
        job: Manifest = {
            "spec": {
                "parallelism": len(pod.hostnames),
                "completions": len(pod.hostnames),
                "completionMode": "Indexed",
                "backoffLimitPerIndex": 0,
                "podReplacementPolicy": "Failed",
                "template": pod_template(pod, launch, settings, restart="Never"),
            }
        }
        if group.exclusive:
            # On the job's metadata; on the pod template it is ignored (xpk#1122).
            job["metadata"] = {"annotations": {_JOBSET_EXCLUSIVE: settings.exclusive_key}}
        jobs.append({"name": "agent" if len(groups) == 1 else f"agent-{index}", "replicas": 1, "template": job})
    return {
        "apiVersion": names.JOBSET.api_version,
        "kind": names.JOBSET.kind,
        "metadata": metadata,
        "spec": {
            "suspend": True,
            "ttlSecondsAfterFinished": settings.ttl_seconds,
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": False},
            "replicatedJobs": jobs,
        },
    }


def _leader_worker_set(
    metadata: Manifest, pod: AgentPod, launch: AgentLaunch, settings: KubernetesSettings
) -> Manifest:
    """A LeaderWorkerSet of one group; leader and workers are equal, the agents do not know of each other."""
    if settings.exclusive_key:
        metadata = metadata | {"annotations": metadata["annotations"] | {_LWS_EXCLUSIVE: settings.exclusive_key}}
    return {
        "apiVersion": names.LEADER_WORKER_SET.api_version,
        "kind": names.LEADER_WORKER_SET.kind,
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": len(pod.hostnames),
                "restartPolicy": "None",
                "workerTemplate": pod_template(pod, launch, settings, restart="Always"),
            },
        },
    }


def _secret(grant: Grant, launch: AgentLaunch, settings: KubernetesSettings, base: str) -> Manifest:
    data = {
        key: base64.b64encode(value.encode()).decode()
        for key, value in sorted(launch.environment.items())
        if key.startswith(settings.pass_environment) and key not in _NOT_PASSED
    }
    metadata = {"name": base, "namespace": settings.namespace, "labels": _labels(grant, settings)}
    return {
        "apiVersion": names.SECRET.api_version,
        "kind": names.SECRET.kind,
        "type": "Opaque",
        "immutable": True,
        "metadata": metadata,
        "data": data,
    }


def _compute_domain(grant: Grant, settings: KubernetesSettings, name: str, num_nodes: int) -> Manifest:
    return {
        "apiVersion": names.COMPUTE_DOMAIN.api_version,
        "kind": names.COMPUTE_DOMAIN.kind,
        "metadata": {"name": name, "namespace": settings.namespace, "labels": _labels(grant, settings)},
        "spec": {"numNodes": num_nodes, "channel": {"resourceClaimTemplate": {"name": name}}},
    }
