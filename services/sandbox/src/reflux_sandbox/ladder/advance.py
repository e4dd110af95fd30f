"""The next step of one group: rungs to start, release, corrections, settlement. A pure function of what is known."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from reflux_sandbox.jobs import REWARDS, Grade
from reflux_sandbox.ladder.release import Rung, all_failed, released_on
from reflux_sandbox.ladder.selection import Answer, plan
from reflux_sandbox.ladder.state import (
    FULL,
    Corrected,
    Event,
    FullEnd,
    LadderSpec,
    LadderState,
    Released,
    Unresolved,
)
from reflux_sandbox.ladder.value import Forecaster, leads


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What the group has to know of its run."""

    forecaster: Forecaster = field(default_factory=lambda: Forecaster([]))
    trusted: bool = False
    newest_version: int = 0
    cost_seconds: float = 1.0
    """CPU seconds of a full verification that nothing is known of."""
    spent_cpu_seconds: float = 0.0
    """Of the step's budget, by groups of the same policy version; this group's own reservations included."""


@dataclass(frozen=True, kw_only=True)
class News:
    """Jobs of the group that have ended since its state was stored."""

    rungs: Mapping[Rung, tuple[Grade, ...]] = field(default_factory=dict)
    full: Mapping[int, FullEnd] = field(default_factory=dict)
    cancelled: bool = False
    """The caller wants it settled now."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The state behind the step, and what follows from it."""

    state: LadderState
    events: tuple[Event, ...] = ()
    climb: Rung | None = None
    """Rung below full that is to be graded now."""
    priorities: Mapping[int, float] = field(default_factory=dict)
    """Full verifications that are wanted, by different answer."""


def advance(spec: LadderSpec, state: LadderState, news: News, view: RunView, now: float) -> Step:
    """Takes the news in and goes as far as is known. `now` is Unix time; a settled ladder stays as it is."""
    if state.settled:
        return Step(state=state)
    fresh = {kind: end for kind, end in news.full.items() if kind not in state.full and kind not in state.skipped}
    reserved = {kind: cost for kind, cost in state.reserved.items() if kind not in fresh}
    state = replace(state, grades={**state.grades, **news.rungs}, full={**state.full, **fresh}, reserved=reserved)
    if news.cancelled:
        return Step(state=_skip(spec, state, "cancelled"))
    if (climb := spec.next_rung(state.grades)) is not None:
        failed = "rule" in state.grades and all_failed(state.grades["rule"])
        return _released(spec, state, view, now) if failed else Step(state=state, climb=climb)
    before = state.released_on
    step = _released(spec, state, view, now)
    state, events = step.state, [*step.events]
    if state.released_on not in (None, FULL):
        # On release all that was known before is told; after it, only what is new.
        told = fresh if before is not None else state.full
        events += [event for kind in sorted(told) for event in _late(spec, state, kind)]
    state, priorities = _planned(spec, state, view)
    return Step(state=state, events=tuple(events), priorities=priorities)


def _released(spec: LadderSpec, state: LadderState, view: RunView, now: float) -> Step:
    """Releases the group if it is time."""
    if state.released_on is not None:
        return Step(state=state)
    failed = "rule" in state.grades and all_failed(state.grades["rule"])
    finished: list[Rung] = [*state.grades]
    if set(state.full) | set(state.skipped) >= set(range(spec.count)):
        finished.append(FULL)
    known = any(answer.cheap is not None for answer in answers_of(spec, state))
    rung = released_on(spec.release, finished, trusted=view.trusted and known, failed=failed)
    if rung is None:
        return Step(state=state)
    grades = _full_grades(spec, state) if rung == FULL else state.grades[rung]
    final = rung == FULL or failed
    state = replace(
        state,
        released_on=rung,
        released_at=now,
        selected=not final and spec.selective and len(view.forecaster) >= spec.value.least_pairs,
        predicted={} if final else _predicted(spec, state, view),
    )
    if failed:
        state = _skip(spec, state, "failed_rule")
    return Step(state=state, events=(Released(rung=rung, grades=grades, final=final),))


def _full_grades(spec: LadderSpec, state: LadderState) -> tuple[Grade, ...]:
    missing = Grade(outcome="cancelled", message="not verified in full")
    return tuple(state.full[kind].grade if kind in state.full else missing for kind in spec.kinds)


def _predicted(spec: LadderSpec, state: LadderState, view: RunView) -> dict[int, tuple[float, float]]:
    """What is forecast for the answers whose full reward is not known yet."""
    if len(view.forecaster) < spec.value.least_pairs:
        return {}
    rows = enumerate(answers_of(spec, state))
    return {
        kind: view.forecaster.outlook(each.cheap, each.lead, each.copies).interval
        for kind, each in rows
        if each.cheap is not None and not each.ended
    }


def _late(spec: LadderSpec, state: LadderState, kind: int) -> list[Event]:
    """What a full verdict means for the samples of a group that was released without it."""
    assert state.released_on is not None
    grade, released = state.full[kind].grade, state.grades[state.released_on]
    if grade.outcome not in REWARDS:
        return [Unresolved(kind=kind, sample=sample, grade=grade) for sample in spec.samples_of(kind)]
    return [
        Corrected(
            kind=kind,
            sample=sample,
            provisional=reward_of(released[sample]),
            final=grade.reward,
            provisional_rung=state.released_on,
        )
        for sample in spec.samples_of(kind)
    ]


def _planned(spec: LadderSpec, state: LadderState, view: RunView) -> tuple[LadderState, Mapping[int, float]]:
    """Chooses the full verifications, and books their cost."""
    left = math.inf
    if spec.value.budget_cpu_seconds:
        left = spec.value.budget_cpu_seconds - view.spent_cpu_seconds
    free = spec.audited or not spec.selective or spec.release == FULL or not view.trusted
    chosen = plan(
        answers_of(spec, state),
        view.forecaster,
        spec.value,
        exempt=free or state.released_on is None,
        cost_seconds=view.cost_seconds,
        lag=view.newest_version - spec.policy_version,
        budget_left=left,
    )
    reserved = {kind: cost for kind, cost in state.reserved.items() if kind not in chosen.skipped}
    reserved |= {kind: view.cost_seconds for kind in chosen.wanted if kind not in state.started}
    state = replace(
        state,
        started=state.started | frozenset(chosen.wanted),
        skipped={**state.skipped, **chosen.skipped},
        reserved=reserved,
    )
    return state, chosen.wanted


def _skip(spec: LadderSpec, state: LadderState, why: str) -> LadderState:
    """Gives up every full verification that has not ended."""
    rest = {kind: why for kind in range(spec.count) if kind not in state.full and kind not in state.skipped}
    return replace(state, skipped={**state.skipped, **rest}, reserved={})


def answers_of(spec: LadderSpec, state: LadderState) -> list[Answer]:
    """The different answers as the selection sees them."""
    cheap_rung = spec.cheap
    grades = state.grades.get(cheap_rung, ()) if cheap_rung else ()
    cheap = [reward_of(grades[spec.samples_of(kind)[0]]) if grades else None for kind in range(spec.count)]
    known = [reward for reward in cheap if reward is not None]
    lead = iter(leads(known))
    return [
        Answer(
            cheap=reward,
            lead=0.0 if reward is None else next(lead),
            copies=len(spec.samples_of(kind)),
            full=reward_of(state.full[kind].grade) if kind in state.full else None,
            ended=kind in state.full,
            started=kind in state.started,
            closed=kind in state.skipped,
        )
        for kind, reward in enumerate(cheap)
    ]


def reward_of(grade: Grade) -> float | None:
    """The reward of a grade; None when its outcome says nothing about the answer."""
    return grade.reward if grade.outcome in REWARDS else None
