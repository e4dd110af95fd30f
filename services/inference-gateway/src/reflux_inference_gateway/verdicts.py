"""What requests have shown of replicas: a breaker for each, a canary per model. Pure; the caller brings the clock."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from reflux_inference_gateway.division import Division
from reflux_inference_gateway.policy.breaker import Breaker, Position
from reflux_inference_gateway.replicas import Replica, ReplicaInfo
from reflux_inference_gateway.want import Want

log = logging.getLogger(__name__)


@dataclass
class Verdicts:
    """Owns the breakers and the divisions of traffic; both learn from the same outcomes."""

    divisions: dict[str, Division] = field(default_factory=dict)
    """By model."""
    _breakers: dict[str, Breaker] = field(default_factory=dict)

    def preferred(self, want: Want, fitting: Sequence[Replica], now: float) -> list[Replica]:
        """Of those that fit the ones of the request's arm whose breaker lets it through; never none of some."""
        spared = [one for one in fitting if self._allows(one.info.name, now)] or [*fitting]
        division = self.divisions.get(want.model_id)
        return spared if division is None else division.preferred(spared, want.key)

    def started(self, name: str, now: float) -> None:
        """A request goes to a replica."""
        if name in self._breakers:
            self._breakers[name].started(now)

    def ended(self, info: ReplicaInfo, verdict: bool | None, now: float) -> None:
        """A request that was `started` is over: True for an answer, False for a failure of the replica, None when it
        says nothing about the replica (the caller went away or was wrong). `info` is what the replica was at the start.
        """
        name = info.name
        breaker = self._breakers.get(name)
        if verdict is False:
            breaker = self._breakers.setdefault(name, Breaker())
            breaker.failed(now)
        elif breaker is not None:
            breaker.succeeded(now) if verdict else breaker.cancelled(now)
        division = self.divisions.get(info.model_id)
        if division is not None and verdict is not None and division.answered(info, failed=not verdict):
            log.warning("%s: %s; its weight is 0 now", info.model_id, division.traffic.rolled_back)

    def reported(self, info: ReplicaInfo) -> None:
        """A replica said how it is; a fault (its log-probs on the probe prompt, its weights) takes its canary back."""
        division = self.divisions.get(info.model_id)
        if division is not None and info.fault and division.condemned(info):
            log.warning("%s: %s; its weight is 0 now", info.model_id, division.traffic.rolled_back)

    def forget(self, name: str) -> None:
        """A replica left or is a new process."""
        self._breakers.pop(name, None)

    def positions(self, now: float) -> dict[str, Position]:
        """Where breakers are that saw a failure, by replica."""
        return {name: breaker.position(now) for name, breaker in self._breakers.items()}

    def _allows(self, name: str, now: float) -> bool:
        return name not in self._breakers or self._breakers[name].allows(now)
