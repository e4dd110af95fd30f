"""Percentiles and counts of a run, overall and by kind. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sending import Outcome

SHARES = (50.0, 90.0, 99.0, 99.9)
TIMES: dict[str, tuple[str, Callable[[Outcome], float | None]]] = {
    "first_token": ("time to first token", lambda one: one.first if not one.error else None),
    "per_token": ("time per token after it", lambda one: one.per_token),
    "total": ("whole answer", lambda one: one.total if not one.error else None),
}
"""Figures of answers that came whole: name, what people read, how it is found."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the least value that `share` percent of all are not above."""
    rank = -(-len(ordered) * share // 100)
    return ordered[max(0, int(rank) - 1)]


@dataclass(frozen=True)
class Summary:
    """One kind, or all of them."""

    name: str
    requests: int
    tokens: int
    errors: dict[str, int]
    times: dict[str, dict[str, float]]
    """By figure: percentiles and "max", in seconds; a figure that no request has is left out."""

    @property
    def failed(self) -> int:
        """Requests without a whole answer."""
        return sum(self.errors.values())


def summary(name: str, outcomes: Sequence[Outcome]) -> Summary:
    """Counts and percentiles of some outcomes."""
    times = {}
    for figure, (_, pick) in TIMES.items():
        if ordered := sorted(value for one in outcomes if (value := pick(one)) is not None):
            times[figure] = {f"p{share:g}": percentile(ordered, share) for share in SHARES} | {"max": ordered[-1]}
    errors = Counter(one.error for one in outcomes if one.error)
    return Summary(name, len(outcomes), sum(one.tokens for one in outcomes), dict(errors.most_common()), times)


def by_kind(outcomes: Sequence[Outcome]) -> list[Summary]:
    """All requests first, then each kind in alphabetical order."""
    kinds = sorted({one.kind for one in outcomes})
    parts = [summary(kind, [one for one in outcomes if one.kind == kind]) for kind in kinds]
    return [summary("all", outcomes), *(parts if len(parts) > 1 else [])]


def flat(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """The figures of a run for machines: milliseconds, rates and counts."""
    whole = summary("all", outcomes)
    late = sorted(one.late for one in outcomes) or [0.0]
    figures = {
        f"{name}_{share}_ms": round(value * 1e3, 3)
        for name, shares in whole.times.items()
        for share, value in shares.items()
    }
    return {
        "requests": whole.requests,
        "failed": whole.failed,
        "requests_per_s": round(whole.requests / seconds, 3),
        "tokens_per_s": round(whole.tokens / seconds, 1),
        "generator_late_p99_ms": round(percentile(late, 99.0) * 1e3, 3),
        **figures,
    }
