import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.xrd.label import LabelVerifier
from reflux_tasks.xrd.task import XrdTask

RUTILE, HALITE, QUARTZ, GOLD = "Ti O n2 sg136", "Na Cl sg225", "Si O n2 sg152", "Au sg225"
ONE = {"phases": [{"label": RUTILE}], "elements": ["O", "Si", "Ti"]}
TWO = {"phases": [{"label": RUTILE}, {"label": HALITE}], "elements": ["Cl", "Na", "O", "Si", "Ti"]}


def reward(payload: dict, *phases: str) -> float:
    [grade] = LabelVerifier().grade(payload, [" <sep> ".join(phases) + " <eos>"])
    assert grade.outcome == "scored"
    return grade.reward


@pytest.mark.parametrize(
    ("payload", "phases", "expected"),
    [
        (ONE, [RUTILE], 1.0),
        (ONE, [QUARTZ], 0.0),
        (ONE, [RUTILE, QUARTZ], 0.8),
        (ONE, [QUARTZ, RUTILE], 0.8),
        (ONE, [RUTILE, QUARTZ, HALITE], 0.6),
        (TWO, [RUTILE, HALITE], 1.0),
        (TWO, [HALITE, RUTILE], 1.0),
        (TWO, [RUTILE], 0.5),
        (TWO, [RUTILE, QUARTZ], 0.4),
        (TWO, [RUTILE, HALITE, QUARTZ], 0.9),
        (TWO, [QUARTZ], 0.0),
    ],
)
def test_the_reward_follows_the_formula(payload: dict, phases: list[str], expected: float) -> None:
    assert reward(payload, *phases) == pytest.approx(expected)


def test_a_repeated_phase_counts_as_extra() -> None:
    assert reward(TWO, RUTILE, RUTILE) == pytest.approx(0.4)
    assert reward(ONE, RUTILE, RUTILE) == pytest.approx(0.8)


def test_an_unknown_phase_and_a_foreign_element_count_as_extra() -> None:
    assert reward(TWO, RUTILE, HALITE, "Ti O n7 sg1") == pytest.approx(0.9)
    assert reward(TWO, RUTILE, GOLD) == pytest.approx(0.4)
    [grade] = LabelVerifier().grade(TWO, [f"{GOLD} <eos>"])
    assert grade.detail["foreign_elements"] == ["Au"]


def test_naming_everything_earns_nothing(task: XrdTask) -> None:
    truth = task.truth(task.problem("heldout", 0))
    every = [" ".join(phase.label) for phase in task.phases]
    some = every[:18]
    assert reward(truth, *some, *(phase["label"] for phase in truth["phases"])) == 0.0
    [grade] = LabelVerifier().grade(truth, [" <sep> ".join(every) + " <eos>"])
    assert (grade.outcome, grade.reward) == ("invalid", 0.0)


def test_an_answer_without_end_is_invalid_and_worth_nothing() -> None:
    [grade] = LabelVerifier().grade(ONE, [RUTILE])
    assert (grade.outcome, grade.reward) == ("invalid", 0.0)
    assert "<eos>" in grade.detail["reason"]


def test_text_and_words_are_graded_alike() -> None:
    text, words = LabelVerifier().grade(ONE, [f"{RUTILE} <eos>", [*RUTILE.split(), "<eos>"]])
    assert text == words


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(), st.lists(st.text(max_size=5))), max_size=5))
def test_no_answer_makes_it_raise_and_rewards_stay_in_range(answers: list) -> None:
    grades = LabelVerifier().grade(TWO, answers)
    assert len(grades) == len(answers)
    assert all(0 <= grade.reward <= 1 for grade in grades)


@pytest.mark.parametrize("payload", [{}, {"phases": [], "elements": []}, {"phases": 3, "elements": []}])
def test_a_foreign_payload_is_the_callers_error(payload: dict) -> None:
    with pytest.raises(ValueError, match="payload"):
        LabelVerifier().grade(payload, ["x"])
