"""What became of the answers of a run, and whether its timeouts go with the length of answers. Pure.

Slow answers are a way to game a reward that is unknown for them, so the service keeps, over all answers that were at
work, the moments of x = ln(1 + characters) and of t = 1 when the deadline passed. The correlation of the two
(point-biserial: Pearson's with a variable that is 0 or 1) follows from these sums alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from reflux_sandbox.jobs import Outcome

_OUTCOMES: tuple[Outcome, ...] = ("scored", "invalid", "timeout", "infra_error", "cancelled")
_LEAST_TIMEOUTS = 5
_LEAST_CORRELATION = 0.1
_LEAST_P_VALUE = 0.001


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """`p_value`: probability of |r| this large by chance, by Fisher's z = atanh(r) sqrt(n - 3); 1.0 below n = 10."""

    answers: int
    r: float = 0.0
    p_value: float = 1.0
    suspicious: bool = False
    """Timeouts go with long answers, beyond chance."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Answers of a run by outcome, and what they cost."""

    outcomes: Mapping[Outcome, int]
    executed: int
    reused: int
    cpu_seconds: float
    lengths: Correlation


def correlate(n: float, t: float, x: float, xx: float, xt: float) -> Correlation:
    """From the sums of 1, t, x, x^2 and x t over the answers."""
    spread_x, spread_t = n * xx - x * x, n * t - t * t
    if n < 10 or t < 1 or spread_x <= 1e-9 * n * xx or spread_t <= 0:
        return Correlation(answers=round(n))
    r = max(-1.0, min(1.0, (n * xt - x * t) / math.sqrt(spread_x * spread_t)))
    z = math.atanh(min(abs(r), 1 - 1e-12)) * math.sqrt(n - 3)
    p_value = math.erfc(z / math.sqrt(2))
    suspicious = t >= _LEAST_TIMEOUTS and r >= _LEAST_CORRELATION and p_value <= _LEAST_P_VALUE
    return Correlation(answers=round(n), r=r, p_value=p_value, suspicious=suspicious)


def to_report(row: Mapping[bytes, bytes]) -> Report:
    """From the hash report:<run>; an unknown run has an empty one."""

    def number(name: str) -> float:
        return float(row.get(name.encode(), 0))

    return Report(
        outcomes={outcome: int(number(outcome)) for outcome in _OUTCOMES},
        executed=int(number("executed")),
        reused=int(number("reused")),
        cpu_seconds=number("cpu"),
        lengths=correlate(*(number(f"length_{name}") for name in ("n", "t", "x", "xx", "xt"))),
    )
