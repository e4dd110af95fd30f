"""Backends by name. Each client is imported only when it is used, because it is an extra of this distribution.

A factory takes what the backend's TOML file says (empty for all defaults) and how agents are started. It may raise
pydantic's ValidationError for what the file says, and ImportError when the extra is not installed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from reflux_scheduler.backends.base import AgentLaunch, Backend
from reflux_scheduler.backends.local import LocalBackend

BackendName = Literal["local", "slurm", "ray", "kubernetes"]
BackendFactory = Callable[[Mapping[str, Any], AgentLaunch], Backend]


def _local(values: Mapping[str, Any], launch: AgentLaunch) -> Backend:
    if values:
        raise ValueError(f"backend local has no options, but its file sets {', '.join(sorted(values))}")
    return LocalBackend()


def _slurm(values: Mapping[str, Any], launch: AgentLaunch) -> Backend:
    from reflux_scheduler.backends.slurm.backend import SlurmBackend
    from reflux_scheduler.backends.slurm.settings import SlurmSettings

    return SlurmBackend(SlurmSettings(**values), launch)


def _ray(values: Mapping[str, Any], launch: AgentLaunch) -> Backend:
    from reflux_scheduler.backends.ray.backend import RayBackend
    from reflux_scheduler.backends.ray.settings import RaySettings

    return RayBackend(RaySettings(**values), launch)


def _kubernetes(values: Mapping[str, Any], launch: AgentLaunch) -> Backend:
    from reflux_scheduler.backends.kubernetes.backend import KubernetesBackend
    from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

    return KubernetesBackend(KubernetesSettings(**values), launch)


BACKENDS: Mapping[BackendName, BackendFactory] = {
    "local": _local,
    "slurm": _slurm,
    "ray": _ray,
    "kubernetes": _kubernetes,
}
