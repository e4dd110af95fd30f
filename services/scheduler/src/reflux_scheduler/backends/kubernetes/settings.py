"""Owns what an operator can set about the Kubernetes cluster."""

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from reflux_placement.sources.labels import KUBERNETES_LEVEL_KEYS


class Toleration(BaseModel):
    """A taint that agents tolerate, in the words of the Kubernetes API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = ""
    """Empty tolerates every key; the operator has to be Exists then."""

    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Empty tolerates every effect."""


class KubernetesSettings(BaseModel):
    """Settings of the Kubernetes backend. What is left empty is left out of the manifests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = ""
    """Address of the API server; empty takes `kubeconfig`, then KUBECONFIG, then the service account of this pod."""

    token_file: str = ""
    """Bearer token for `url`, read again every minute."""

    ca_file: str = ""
    """Certificate authority for `url`; empty trusts the system's."""

    kubeconfig: str = ""
    """Path of a kubeconfig file."""

    context: str = ""
    """Context in the kubeconfig; empty takes its current one."""

    cluster: str = Field(default="kubernetes", min_length=1)
    """Name of the cluster: root of every path in its topology."""

    namespace: str = "reflux"
    stack: str = Field(default="reflux", max_length=20)
    """Begins every name and labels every object: two stacks in one namespace need two names."""

    image: str = "reflux-agent:latest"
    """Image with `reflux-agent` and all roles."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str = ""
    """Service account of the agents' pods. Its token is not mounted: agents do not talk to the API server."""

    priority_class: str = ""
    scheduler_name: str = ""
    """Name of the pod scheduler; empty is the cluster's default."""

    tolerations: tuple[Toleration, ...] = (Toleration(key="nvidia.com/gpu"),)
    node_selector: str = ""
    """Label selector of the nodes that belong to the topology; empty takes all."""

    level_keys: Mapping[str, tuple[str, ...]] = Field(
        default_factory=lambda: {level: tuple(keys) for level, keys in KUBERNETES_LEVEL_KEYS.items()}
    )
    """Label keys per level of the topology, levels tightest first, keys most trusted first."""

    count_foreign: bool = True
    """Follow the pods of all namespaces, so that what others hold on a node is known. Needs a ClusterRole."""

    reserve_millicpus: int = Field(default=0, ge=0)
    """Thousandths of a CPU per node that are kept free of grants; for daemons when `count_foreign` is off."""

    reserve_memory_bytes: int = Field(default=0, ge=0)
    """Memory per node that is kept free of grants."""

    gpu_resource: str = "nvidia.com/gpu"
    extra_resources: Mapping[str, str] = Field(default_factory=dict)
    """Further limits of every pod with GPUs, for example {"rdma/hca": "1"}."""

    workload: Literal["jobset", "leaderworkerset"] = "jobset"
    """What a grant is made of. A LeaderWorkerSet starts a failed agent anew on the same node, a JobSet does not."""

    kueue_queue: str = ""
    """LocalQueue that admits the grants; empty does without Kueue."""

    kueue_levels: tuple[str, ...] = ()
    """Node label keys of Kueue's Topology, outermost first; empty asks for no topology."""

    kueue_max_pod_sets: int = Field(default=8, ge=1)
    """Pod sets per workload that the installed Kueue takes: 8 at first, 10 and then 18 since kueue#11388, #12819."""

    exclusive_key: str = ""
    """Node label key: every job gets domains of it for itself (JobSet's and LeaderWorkerSet's exclusive topology)."""

    imex: bool = False
    """Make a ComputeDomain (NVIDIA's DRA driver) for each NVLink domain in which a grant has several nodes."""

    start_deadline_seconds: float = Field(default=600.0, gt=0)
    """A grant whose agents are not all ready by then is given up. Waiting for Kueue does not count."""

    lost_node_seconds: int = Field(default=60, ge=0)
    """How long agents stay bound to a node that is not ready or cannot be reached."""

    ttl_seconds: int = Field(default=3600, ge=0)
    """How long ended JobSets are kept for people to look at, unless they are released."""

    grace_seconds: int = Field(default=60, ge=1)
    """How long an agent may take to stop its members before it is killed."""

    call_seconds: float = Field(default=10.0, gt=0)
    """Deadline of one call to the API server."""

    agent_port: int = Field(default=7007, ge=0, lt=65536)
    """gRPC port of the agents. 0: each takes a free one (needed with `host_network`) and has no readiness probe."""

    agent_http_port: int = Field(default=8007, ge=0, lt=65536)
    """Port for /metrics; used with `agent_port` only."""

    host_network: bool = False
    pass_environment: tuple[str, ...] = ("REFLUX_", "OTEL_")
    """How names of variables begin that agents get from the scheduler's environment; the image has the others."""

    state_dir: str = "/var/lib/reflux"
    """Folder inside the pod for sockets, caches and logs (an emptyDir)."""

    shm_bytes: int = Field(default=0, ge=0)
    """Size limit of /dev/shm, a memory-backed emptyDir; 0 is none but the pod's memory limit."""

    run_as_user: int = Field(default=10001, ge=0)
    """User id of the agents; 0 takes what the image says."""

    @field_validator("stack")
    @classmethod
    def _stack_begins_names(cls, stack: str) -> str:
        if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", stack):
            raise ValueError(f"{stack!r} cannot begin object names: use a-z, 0-9 and '-', a letter first")
        return stack
