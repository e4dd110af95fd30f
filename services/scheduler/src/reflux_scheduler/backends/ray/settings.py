"""Owns the settings of the Ray backend."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from reflux_placement.sources.labels import RAY_LEVEL_KEYS


class RaySettings(BaseModel):
    """How to find a Ray cluster and how to read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = "auto"
    """host:port of the head's GCS; "auto" finds the cluster that this machine belongs to, as a Ray job's driver does.
    The scheduler runs on a node of the cluster."""

    namespace: str = "reflux"
    """Ray namespace of groups, actors and records: two stacks on one cluster have one each."""

    cluster: str = Field(default="ray", min_length=1)
    """Name of the cluster, root of every path."""

    level_keys: Mapping[str, tuple[str, ...]] = Field(
        default_factory=lambda: {level: tuple(keys) for level, keys in RAY_LEVEL_KEYS.items()}
    )
    """Label keys per level, tightest level first, most trusted key first."""

    domain_key: str = "ray.io/gpu-domain"
    """Label of a node's NVLink domain, for topology_strategy. Ray writes it only where `ray start --labels` says so."""

    node_name_key: str = ""
    """Label that names a node; empty takes Ray's own name (`ray start --node-name`, the address by default)."""

    start_seconds: float = Field(default=120.0, gt=0)
    """How long the agents of a placed grant may take to start."""

    stop_grace_seconds: float = Field(default=5.0, ge=0)
    """How long an agent may take to stop when its grant is released."""

    call_seconds: float = Field(default=15.0, gt=0)
    """Deadline of every call to Ray; a driver that misses it is ended and replaced."""

    connect_seconds: float = Field(default=45.0, gt=0)
    """How long a new driver may take to join the cluster."""
