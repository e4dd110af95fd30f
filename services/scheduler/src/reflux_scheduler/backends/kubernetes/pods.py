"""Owns the pod of one agent: where it may run, what it may use, how it learns of node and grant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import AgentLaunch
from reflux_scheduler.backends.kubernetes.names import GRANT_LABEL, HOSTNAME
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

Manifest = dict[str, Any]

_CLAIM = "imex"
_GONE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPod:
    """What the pods of one group have in common; each runs on another one of `hostnames`."""

    grant_id: str
    hostnames: tuple[str, ...]
    resources: Resources
    secret: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    claim_template: str = ""
    """ResourceClaimTemplate of the group's ComputeDomain; empty is none."""


def pod_template(pod: AgentPod, launch: AgentLaunch, settings: KubernetesSettings, *, restart: str) -> Manifest:
    """Pod template of a group. The stack's secrets come from a Secret; they are never in here."""
    spec: Manifest = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "affinity": _affinity(pod),
        "tolerations": _tolerations(settings),
        "containers": [_container(pod, launch, settings)],
        "volumes": _volumes(settings),
    }
    optional = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "schedulerName": settings.scheduler_name,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
    }
    spec |= {key: value for key, value in optional.items() if value}
    if settings.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if settings.run_as_user:
        spec["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": settings.run_as_user,
            "runAsGroup": settings.run_as_user,
            "fsGroup": settings.run_as_user,
        }
    if pod.claim_template:
        spec["resourceClaims"] = [{"name": _CLAIM, "resourceClaimTemplateName": pod.claim_template}]
    metadata: Manifest = {"labels": dict(pod.labels)}
    if pod.annotations:
        metadata["annotations"] = dict(pod.annotations)
    return {"metadata": metadata, "spec": spec}


def _affinity(pod: AgentPod) -> Manifest:
    """Exactly the nodes of the group, and on each of them one pod of the grant."""
    term = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": list(pod.hostnames)}]}
    affinity: Manifest = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    }
    if len(pod.hostnames) > 1:
        same_grant = {"matchLabels": {GRANT_LABEL: pod.labels[GRANT_LABEL]}}
        affinity["podAntiAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": HOSTNAME, "labelSelector": same_grant}]
        }
    return affinity


def _tolerations(settings: KubernetesSettings) -> list[Manifest]:
    """The operator's, and short ones for nodes that went away (Kubernetes' own default is five minutes)."""
    wanted = [each.model_dump(exclude_defaults=True) | {"operator": each.operator} for each in settings.tolerations]
    gone = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": settings.lost_node_seconds}
    return [*wanted, *({"key": key, **gone} for key in _GONE_TAINTS)]


def _container(pod: AgentPod, launch: AgentLaunch, settings: KubernetesSettings) -> Manifest:
    container: Manifest = {
        "name": "agent",
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": list(launch.argv),
        "envFrom": [{"secretRef": {"name": pod.secret}}],
        "env": _environment(pod, settings),
        "resources": _resources(pod, settings),
        "volumeMounts": [{"name": "state", "mountPath": settings.state_dir}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if settings.agent_port:
        container["ports"] = [
            {"name": name, "containerPort": port}
            for name, port in (("grpc", settings.agent_port), ("metrics", settings.agent_http_port))
            if port
        ]
        container["readinessProbe"] = {"grpc": {"port": settings.agent_port}, "periodSeconds": 5, "timeoutSeconds": 3}
    return container


def _environment(pod: AgentPod, settings: KubernetesSettings) -> list[Manifest]:
    """What depends on node and grant. Entries here win over those of the Secret."""
    environment: list[Manifest] = [
        {"name": "REFLUX_AGENT_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "REFLUX_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "REFLUX_AGENT_GRANT", "value": pod.grant_id},
        {"name": "REFLUX_AGENT_LISTEN", "value": f"$(REFLUX_POD_IP):{settings.agent_port}"},
        {"name": "REFLUX_STATE_DIR", "value": settings.state_dir},
    ]
    if settings.agent_port and settings.agent_http_port:
        address = f"$(REFLUX_POD_IP):{settings.agent_http_port}"
        environment.append({"name": "REFLUX_AGENT_HTTP_LISTEN", "value": address})
    return environment


def _resources(pod: AgentPod, settings: KubernetesSettings) -> Manifest:
    """CPUs are requested but not limited: throttling an agent that was given a node's CPUs helps nobody."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if pod.resources.millicpus:
        requests["cpu"] = f"{pod.resources.millicpus}m"
    if pod.resources.memory_bytes:
        requests["memory"] = limits["memory"] = str(pod.resources.memory_bytes)
    if pod.resources.gpus:
        limits[settings.gpu_resource] = str(pod.resources.gpus)
        limits |= settings.extra_resources
    resources: Manifest = {"requests": requests, "limits": limits}
    if pod.claim_template:
        resources["claims"] = [{"name": _CLAIM}]
    return {key: value for key, value in resources.items() if value}


def _volumes(settings: KubernetesSettings) -> Sequence[Manifest]:
    memory: Manifest = {"medium": "Memory"}
    if settings.shm_bytes:
        memory["sizeLimit"] = str(settings.shm_bytes)
    return [{"name": "state", "emptyDir": {}}, {"name": "shm", "emptyDir": memory}]
