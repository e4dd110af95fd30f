"""The division of a model's requests between arms: which replicas an arm has, which of them a request prefers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_inference_gateway.policy.traffic import CanaryLimits, Traffic
from reflux_inference_gateway.replicas import Replica, ReplicaInfo


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A weight version or a pool of replicas: those that match everything that is set."""

    name: str
    weight: float
    version: int | None = None
    run: str = ""
    engine: str = ""
    replicas: tuple[str, ...] = ()
    """Names."""

    def has(self, info: ReplicaInfo) -> bool:
        """True when the replica belongs to the arm."""
        return (
            self.version in (None, info.version)
            and self.run in ("", info.run)
            and self.engine in ("", info.engine)
            and (not self.replicas or info.name in self.replicas)
        )


class Division:
    """Owns the arms of one model and the policy that chooses between them."""

    def __init__(self, arms: Sequence[Arm], canary: str = "", limits: CanaryLimits | None = None) -> None:
        """Raises ValueError for names that repeat, weights that make no division, a canary without another arm."""
        if len({arm.name for arm in arms}) < len(arms):
            raise ValueError("names of arms must differ")
        self.arms = tuple(arms)
        self.canary = canary
        self.traffic = Traffic()
        self.traffic.set({arm.name: arm.weight for arm in arms}, canary, limits)

    def preferred(self, fitting: Sequence[Replica], key: str) -> list[Replica]:
        """Those of the arm that the key belongs to; all when the arm has none of them: weights never drop a request."""
        chosen = self.traffic.arm(key)
        return [one for one in fitting if any(arm.name == chosen and arm.has(one.info) for arm in self.arms)] or [
            *fitting
        ]

    def answered(self, info: ReplicaInfo, *, failed: bool) -> bool:
        """Tells how a request on a replica ended; True when this takes the canary back."""
        return self._is_canary(info) and self.traffic.answered(self.canary, failed)

    def condemned(self, info: ReplicaInfo) -> bool:
        """Tells that a replica is unhealthy; True when this takes the canary back."""
        return self._is_canary(info) and self.traffic.condemned(self.canary, f"{info.name} is unhealthy, {info.fault}")

    def _is_canary(self, info: ReplicaInfo) -> bool:
        return any(arm.name == self.canary and arm.has(info) for arm in self.arms)
