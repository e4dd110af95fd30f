"""Which full verifications of a released group run next, and which never: the value of information applied. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from reflux_sandbox.ladder.value import Estimator, Forecaster, Outlook, advantages, expected_error, gains, settled

Skip = Literal["decided", "negligible", "stale", "budget"]
"""decided: no full reward can change the advantages, as far as known. negligible: they are expected to change by less
than is tolerated. stale: no step may train on the group any more. budget: the step's CPU seconds are spent."""


@dataclass(frozen=True, kw_only=True)
class ValuePolicy:
    """What a run asks of the selection."""

    estimator: Estimator = "grpo"
    tolerated_error: float = 0.05
    """Expected mean absolute error of a group's advantages below which its other verifications are cancelled. The
    mean over groups is far smaller, because most of them are verified or decided."""
    audit_share: float = 0.1
    """Share of groups that are verified in full, whatever they seem worth."""
    least_pairs: int = 64
    """Pairs below which nothing is forecast and everything is verified."""
    max_lag: int = 0
    """Versions behind the newest one after which a group is too old to be corrected; 0 means no bound."""
    budget_cpu_seconds: float = 0.0
    """CPU seconds of full verification per policy version; 0 means no bound. Audited groups are beyond it."""
    in_flight: int = 1
    """Verifications of one forecast group at one time; 1 wastes none on what the next verdict makes needless."""

    def __post_init__(self) -> None:
        if not (0 < self.audit_share <= 1 and self.tolerated_error >= 0 and self.least_pairs >= 2):
            raise ValueError(f"a policy needs audit_share in (0, 1], tolerated_error >= 0, least_pairs >= 2: {self}")
        if self.max_lag < 0 or not 0 <= self.budget_cpu_seconds < math.inf or self.in_flight < 1:
            raise ValueError(f"a policy needs max_lag >= 0, a finite budget_cpu_seconds >= 0, in_flight >= 1: {self}")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One different answer of a group, as far as it is graded."""

    cheap: float | None
    """Reward of the release rung; None when that rung gave none: then nothing can be forecast, and it is verified."""
    lead: float = 0.0
    copies: int = 1
    full: float | None = None
    ended: bool = False
    """The full rung has ended, with a reward or without."""
    started: bool = False
    """Its verification is queued or runs."""
    closed: bool = False
    """It was skipped for good: it counts with its forecast."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with the open answers of a group, by position."""

    wanted: Mapping[int, float] = field(default_factory=dict)
    """Verifications to have in the queue, with their priority: expected change of the advantages per CPU second."""
    skipped: Mapping[int, Skip] = field(default_factory=dict)
    later: frozenset[int] = frozenset()
    """Open ones that wait for the verdict of another."""


def plan(
    answers: Sequence[Answer],
    forecaster: Forecaster,
    policy: ValuePolicy,
    *,
    exempt: bool,
    cost_seconds: float,
    lag: int = 0,
    budget_left: float = math.inf,
) -> Plan:
    """Plans a group. `exempt` groups (audited, or not trusted) are verified in full; `cost_seconds` stands for what
    the forecast does not know."""
    open_answers = [position for position, answer in enumerate(answers) if not answer.ended and not answer.closed]
    if exempt or len(forecaster) < policy.least_pairs:
        return Plan(wanted=dict.fromkeys(open_answers, 1.0 / cost_seconds))
    if policy.max_lag and lag > policy.max_lag:
        return Plan(skipped=dict.fromkeys(open_answers, "stale"))
    blind = [position for position in open_answers if answers[position].cheap is None]
    seen = [position for position in range(len(answers)) if _counts(answers[position])]
    outlooks = [_outlook(answers[position], forecaster) for position in seen]
    worth = dict(zip(seen, _priorities(outlooks, policy.estimator, cost_seconds), strict=True))
    costs = {p: outlook.cpu_seconds or cost_seconds for p, outlook in zip(seen, outlooks, strict=True)}
    forecast = [position for position in open_answers if position in seen]
    skipped: dict[int, Skip] = {}
    if forecast and (error := expected_error(outlooks, policy.estimator)) <= policy.tolerated_error:
        skipped = dict.fromkeys(forecast, "decided" if error == 0 else "negligible")
    # What cannot be forecast comes first: the rest is planned around it.
    ranked = sorted((not answers[p].started, -worth[p], p) for p in forecast if p not in skipped)
    order = [*blind, *(position for *_, position in ranked)]
    affordable = _affordable(order, answers, costs, cost_seconds, budget_left)
    skipped |= dict.fromkeys([position for position in order if position not in affordable], "budget")
    wanted = affordable[: policy.in_flight]
    return Plan(
        wanted={position: worth.get(position, 1.0 / cost_seconds) for position in wanted},
        skipped=skipped,
        later=frozenset(affordable[policy.in_flight :]),
    )


def _affordable(
    order: Sequence[int], answers: Sequence[Answer], costs: Mapping[int, float], default: float, left: float
) -> list[int]:
    """The positions whose cost fits into what is left, in their order; a started one is paid for already."""
    chosen = []
    for position in order:
        cost = 0.0 if answers[position].started else costs.get(position, default)
        if cost <= left:
            left -= cost
            chosen.append(position)
    return chosen


def _counts(answer: Answer) -> bool:
    """Whether the answer has a place in the group's advantages: its full reward is known, or can be forecast."""
    return answer.full is not None or (not answer.ended and answer.cheap is not None)


def _outlook(answer: Answer, forecaster: Forecaster) -> Outlook:
    if answer.full is not None:
        return settled(answer.full, answer.copies)
    assert answer.cheap is not None, "filtered before"
    return forecaster.outlook(answer.cheap, answer.lead, answer.copies)


def _priorities(outlooks: Sequence[Outlook], estimator: Estimator, cost_seconds: float) -> list[float]:
    worth = gains(outlooks, estimator)
    return [gain / (each.cpu_seconds or cost_seconds) for gain, each in zip(worth, outlooks, strict=True)]


def estimates(answers: Sequence[Answer], forecaster: Forecaster, policy: ValuePolicy) -> list[float | None]:
    """The reward that each answer counts with in the end: the full one, else the mean of its forecast, else None."""
    usable = len(forecaster) >= policy.least_pairs
    return [
        answer.full
        if answer.full is not None
        else _outlook(answer, forecaster).estimate
        if usable and _counts(answer)
        else None
        for answer in answers
    ]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the selection would have done with a group whose full rewards are all known."""

    verified: frozenset[int]
    advantage_error: float
    """Mean over the samples of |A with all full rewards - A with the rewards it would have counted with|."""


def audit(answers: Sequence[Answer], forecaster: Forecaster, policy: ValuePolicy, cost_seconds: float) -> Audit:
    """Plays the selection on a group that was verified in full; answers without a verdict do not count."""
    graded = [position for position, answer in enumerate(answers) if answer.full is not None]
    if not graded:
        return Audit(verified=frozenset(), advantage_error=0.0)
    hidden = [Answer(cheap=answers[p].cheap, lead=answers[p].lead, copies=answers[p].copies) for p in graded]
    verified: set[int] = set()
    while wanted := plan(hidden, forecaster, policy, exempt=False, cost_seconds=cost_seconds).wanted:
        for place in wanted:
            real = answers[graded[place]]
            hidden[place] = Answer(cheap=real.cheap, lead=real.lead, copies=real.copies, full=real.full, ended=True)
            verified.add(graded[place])
    used = estimates(hidden, forecaster, policy)
    truth = [answers[position].full for position in graded]
    copies = np.array([answers[position].copies for position in graded])
    apart = advantages(np.array([used, truth], dtype=np.float64), copies, policy.estimator)
    error = float((np.abs(apart[0] - apart[1]) * copies).sum() / copies.sum())
    return Audit(verified=frozenset(verified), advantage_error=error)
