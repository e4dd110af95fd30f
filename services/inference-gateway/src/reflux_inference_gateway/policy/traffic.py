"""How requests are divided between weight versions or replica pools, and when a canary is taken back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

_BITS = 52
"""Of the hash: so few that half a step below 1 is not rounded to 1."""


@dataclass(frozen=True, kw_only=True)
class CanaryLimits:
    """When a canary is taken back."""

    error_rate: float = 0.05
    """Part of its requests that fails when it is bad."""
    good_error_rate: float = 0.01
    """Part that fails when all is well."""
    requests_per_false_alarm: float = 1e6
    """Mean number of requests of a good canary until it is taken back for nothing; at least so many."""

    def __post_init__(self) -> None:
        if not 0 < self.good_error_rate < self.error_rate < 1:
            raise ValueError("a canary needs 0 < good_error_rate < error_rate < 1")
        if self.requests_per_false_alarm <= 1:
            raise ValueError("a canary needs requests_per_false_alarm above 1")


class Canary:
    """Sequential test (cumulative sum: Page 1954) of one arm's errors.

    S = max(0, S + log-likelihood ratio of the outcome, error_rate against good_error_rate), alarm at
    S >= ln(requests_per_false_alarm): the mean time between false alarms is at least that many requests (Lorden
    1971), and a bad canary is found in about ln(.) / KL(bad, good) requests.
    """

    def __init__(self, arm: str, limits: CanaryLimits) -> None:
        self.arm = arm
        self._limits = limits
        self._errors = 0.0

    def answered(self, failed: bool) -> str:
        """Counts a request's outcome; returns why the canary must go, empty while it may stay."""
        bad, good = self._limits.error_rate, self._limits.good_error_rate
        ratio = math.log(bad / good) if failed else math.log((1 - bad) / (1 - good))
        self._errors = max(0.0, self._errors + ratio)
        if self._errors < math.log(self._limits.requests_per_false_alarm):
            return ""
        return f"requests of {self.arm} fail more often than {bad:.1%}"


class Traffic:
    """Arms by weight, sticky by key; a canary that fails loses its weight.

    An arm is a weight version or a pool by name. Each key goes to the arm with the largest -weight / ln(u), u a hash of
    (arm, key) in (0, 1) (weighted rendezvous hashing: Schindelhauer and Schomaker 2005; the logarithmic method):
    P(arm) = weight / sum of weights. When one arm's weight changes, only keys that enter or leave this arm move.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._canary: Canary | None = None
        self.rolled_back = ""
        """Why the last canary lost its weight; empty when it did not."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights as they are now; empty when requests go anywhere."""
        return dict(self._weights)

    def set(self, weights: Mapping[str, float], canary: str = "", limits: CanaryLimits | None = None) -> None:
        """Replaces the division; no weights lift it. A canary is one of several arms with weight.

        Raises ValueError for weights that are negative, infinite or all 0, and for a canary that has nobody to hand
        its requests back to.
        """
        total = sum(weights.values())
        if weights and not (min(weights.values()) >= 0 and 0 < total < math.inf):
            raise ValueError(f"weights must be at least 0 and some above: {dict(weights)}")
        if canary and not 0 < weights.get(canary, 0.0) < total:
            raise ValueError(f"the canary {canary!r} needs a weight, and another arm with one to fall back to")
        self._weights = dict(weights)
        self._canary = Canary(canary, limits or CanaryLimits()) if canary else None
        self.rolled_back = ""

    def arm(self, key: str) -> str:
        """The arm of a trajectory's key; empty when requests go anywhere."""
        weighted = [(_score(arm, key, weight), arm) for arm, weight in self._weights.items() if weight > 0]
        return max(weighted)[1] if weighted else ""

    def answered(self, arm: str, failed: bool) -> bool:
        """Tells how a request of an arm ended; True when this takes the canary back."""
        canary = self._canary_of(arm)
        return canary is not None and self._judge(canary, canary.answered(failed))

    def condemned(self, arm: str, reason: str) -> bool:
        """Tells that an arm computes what it should not, by its log-probs or weights; True when this takes the canary
        back. One such finding is enough: unlike an error it cannot be bad luck.
        """
        canary = self._canary_of(arm)
        return canary is not None and self._judge(canary, f"{arm}: {reason}")

    def _canary_of(self, arm: str) -> Canary | None:
        return self._canary if self._canary is not None and self._canary.arm == arm else None

    def _judge(self, canary: Canary, reason: str) -> bool:
        if reason:
            self._weights[canary.arm] = 0.0
            self._canary, self.rolled_back = None, reason
        return bool(reason)


def _score(arm: str, key: str, weight: float) -> float:
    digest = blake2b(f"{len(arm)}:{arm}{key}".encode(errors="backslashreplace"), digest_size=8).digest()
    unit = ((int.from_bytes(digest, "big") >> (64 - _BITS)) + 0.5) / (1 << _BITS)
    return -weight / math.log(unit)
