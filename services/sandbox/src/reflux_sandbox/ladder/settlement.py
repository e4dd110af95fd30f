"""The end of one group: the rewards that count, what it teaches calibration, and what it cost. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from reflux_sandbox.ladder.advance import RunView, answers_of, reward_of
from reflux_sandbox.ladder.calibration import Record
from reflux_sandbox.ladder.selection import Answer, Audit, Skip, audit, estimates
from reflux_sandbox.ladder.state import FULL, Basis, LadderSpec, LadderState, Settled, SettledSample


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The settled state, its event, and what the run adds up."""

    state: LadderState
    event: Settled
    records: tuple[Record, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    """Amounts by name of the run's counter."""


def is_over(spec: LadderSpec, state: LadderState) -> bool:
    """Whether nothing of the group is open any more."""
    return not state.settled and set(state.full) | set(state.skipped) >= set(range(spec.count))


def settle(spec: LadderSpec, state: LadderState, view: RunView) -> Settlement:
    """Settles a group of which nothing is open."""
    outcomes = [_last_word(spec, state, view, kind) for kind in range(spec.count)]
    samples = tuple(
        SettledSample(
            provisional=_provisional(state, sample),
            reward=outcomes[kind][0],
            basis=outcomes[kind][1],
            skipped=state.skipped.get(kind, ""),
        )
        for sample, kind in enumerate(spec.kinds)
    )
    answers = answers_of(spec, state)
    played = _played(spec, state, view, answers)
    return Settlement(
        state=replace(state, settled=True, rewards=tuple(reward for reward, _ in outcomes), reserved={}),
        event=Settled(released_on=state.released_on, samples=samples),
        records=_records(spec, state, view, answers, played),
        counts=_counts(spec, state, view, answers, played),
    )


def _last_word(spec: LadderSpec, state: LadderState, view: RunView, kind: int) -> tuple[float | None, Basis]:
    if kind in state.full:
        reward = reward_of(state.full[kind].grade)
        return reward, "unknown" if reward is None else "full"
    if state.skipped[kind] == "failed_rule":
        return reward_of(state.grades["rule"][spec.samples_of(kind)[0]]), "released"
    if state.released_on in (None, FULL):
        return None, "unknown"
    forecast = estimates(answers_of(spec, state), view.forecaster, spec.value)[kind]
    return forecast, "unknown" if forecast is None else "forecast"


def _provisional(state: LadderState, sample: int) -> float | None:
    if state.released_on in (None, FULL):
        return None
    return reward_of(state.grades[state.released_on][sample])


def _played(spec: LadderSpec, state: LadderState, view: RunView, answers: Sequence[Answer]) -> Audit | None:
    """What the selection would have done with a group that was verified for the audit only."""
    if not (spec.audited and state.selected):
        return None
    return audit(answers, view.forecaster, spec.value, view.cost_seconds)


def _records(
    spec: LadderSpec, state: LadderState, view: RunView, answers: Sequence[Answer], played: Audit | None
) -> tuple[Record, ...]:
    """Pairs for the calibration; a group that nobody could train on, or that failed the rule check, has none."""
    if state.released_on is None or "failed_rule" in state.skipped.values():
        return ()
    records = []
    for kind, answer in enumerate(answers):
        if answer.cheap is None:
            continue
        end = state.full.get(kind)
        only_audited = played is not None and kind not in played.verified
        records.append(
            Record(
                cheap=answer.cheap,
                lead=answer.lead,
                copies=answer.copies,
                full=answer.full,
                weight=1.0 / spec.value.audit_share if only_audited else 1.0,
                # A grade from the cache cost nothing; the next one like it will.
                cpu_seconds=(end.cpu_seconds or view.cost_seconds) if end else 0.0,
                predicted=state.predicted.get(kind),
            )
        )
    return tuple(records)


def _counts(
    spec: LadderSpec, state: LadderState, view: RunView, answers: Sequence[Answer], played: Audit | None
) -> dict[str, float]:
    measured = [end.cpu_seconds for end in state.full.values() if end.cpu_seconds]
    counts = {
        "groups_settled": 1.0,
        "cpu_seconds": sum(measured),
        "verifications_measured": float(len(measured)),
        "cpu_seconds_saved": sum(
            _forecast_cost(view, spec, answers[kind]) for kind, why in state.skipped.items() if why in get_args(Skip)
        ),
    }
    if played is not None:
        counts |= {"audited_groups": 1.0, "advantage_error": played.advantage_error}
    skipped = Counter(state.skipped.values())
    return counts | {f"skipped:{why}": float(count) for why, count in skipped.items()}


def _forecast_cost(view: RunView, spec: LadderSpec, answer: Answer) -> float:
    if answer.cheap is None or len(view.forecaster) < spec.value.least_pairs:
        return view.cost_seconds
    return view.forecaster.outlook(answer.cheap, answer.lead, 1).cpu_seconds or view.cost_seconds
