"""The names of `base` under their former module."""

from reflux_scheduler.backends.base import (
    AgentLaunch,
    Backend,
    BackendAway,
    Grant,
    GrantRefused,
    GrantState,
    GrantStatus,
    NodeCondition,
    NodeShare,
    NodeState,
)

__all__ = [
    "AgentLaunch",
    "Backend",
    "BackendAway",
    "Grant",
    "GrantRefused",
    "GrantState",
    "GrantStatus",
    "NodeCondition",
    "NodeShare",
    "NodeState",
]
