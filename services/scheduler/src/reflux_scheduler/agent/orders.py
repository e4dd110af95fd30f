"""Values between the agent's parts: what to start, and what a member does."""

from dataclasses import dataclass
from typing import Literal

State = Literal["running", "restarting", "succeeded", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """One member to keep running. `argv[0]` "python" stands for this installation's interpreter."""

    role_id: str
    job: str
    role: str
    rank: int
    count: int
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    gpu_indices: tuple[int, ...] = ()
    """Indices on the node."""

    node_gpu_indices: tuple[int, ...] = ()
    """All GPUs that the agent's allocation has on this node, ascending."""

    rails: tuple[str, ...] = ()
    memory_bytes: int = 0
    millicpus: int = 0
    max_restarts: int = 0
    stop_grace_seconds: float = 10.0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RoleReport:
    """What one member does; `revision` grows with every change on one agent."""

    role_id: str
    job: str
    state: State
    pid: int = 0
    restarts: int = 0
    exit_code: int = 0
    rss_bytes: int = 0
    log_path: str = ""
    message: str = ""
    revision: int = 0
    started_at: float = 0.0
    attempt: int = 0
