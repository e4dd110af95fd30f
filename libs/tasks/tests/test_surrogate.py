import numpy as np
import pytest

from reflux_tasks.xrd.answers import format_answer
from reflux_tasks.xrd.database import PhaseDatabase
from reflux_tasks.xrd.surrogate import SurrogateVerifier
from reflux_tasks.xrd.task import XrdTask


@pytest.fixture(scope="module")
def verifier(database: PhaseDatabase) -> SurrogateVerifier:
    return SurrogateVerifier(database)


@pytest.fixture
def pair(mixtures: XrdTask) -> dict:
    return mixtures.truth(mixtures.problem("heldout", 0))


def true_labels(payload: dict) -> list[list[str]]:
    return [phase["label"].split() for phase in payload["phases"]]


def test_true_single_phases_beat_what_the_elements_allow(task: XrdTask, verifier: SurrogateVerifier) -> None:
    wins = trials = 0
    for index in range(60):
        problem = task.problem("heldout", index)
        if len(problem.phase_ids) == 2:
            continue
        rivals = [q.label for q in task.phases if set(q.elements) <= set(problem.elements)]
        answers = [task.answer_words(problem), *(format_answer([label]) for label in rivals)]
        true, *others = verifier.grade(task.truth(problem), answers)
        wins += true.reward >= max(grade.reward for grade in others)
        trials += 1
    assert wins >= 0.95 * trials


def test_most_true_pairs_beat_their_first_phase_alone(mixtures: XrdTask, verifier: SurrogateVerifier) -> None:
    wins = 0
    for index in range(60):
        truth = mixtures.truth(mixtures.problem("heldout", index))
        both, one = verifier.grade(truth, [format_answer(true_labels(truth)), format_answer(true_labels(truth)[:1])])
        wins += both.reward > one.reward
        assert 0 <= both.detail["peak_f1"] <= 1
    assert wins >= 45


def test_strain_and_shift_do_not_cost_the_truth_much(task: XrdTask, verifier: SurrogateVerifier) -> None:
    rewards = []
    for index in range(40):
        problem = task.problem("heldout", index)
        if len(problem.phase_ids) == 1:
            rewards += [grade.reward for grade in verifier.grade(task.truth(problem), [task.answer_words(problem)])]
    assert np.mean(rewards) > 0.65


def test_padding_an_answer_earns_nothing(task: XrdTask, pair: dict, verifier: SurrogateVerifier) -> None:
    true = true_labels(pair)
    pair["elements"] = list(task.vocabulary.elements)
    others = [list(phase.label) for phase in task.phases if list(phase.label) not in true]
    [honest] = verifier.grade(pair, [format_answer(true)])
    cheats = {
        "one more": [*true, others[0]],
        "three more": [*true, *others[:3]],
        "unknown": [*true, ["Ti", "n7", "O", "sg1"]],
        "duplicate": [*true, true[0]],
        "everything": [*true, *others[:9]],
    }
    grades = dict(zip(cheats, verifier.grade(pair, [format_answer(cheat) for cheat in cheats.values()]), strict=True))
    assert all(grade.reward < honest.reward for grade in grades.values())
    assert grades["duplicate"].detail["gate"] == "a phase twice"
    assert (grades["everything"].reward, grades["everything"].detail["gate"]) == (0, "more than 5 phases")
    padded = grades["three more"]
    assert padded.detail["idle"] >= 1, "phases that explain next to nothing"
    expected = 1 - padded.detail["profile_r"] ** 2 - 0.05 * (len(true) + 2) - 0.1 * padded.detail["idle"]
    assert padded.reward == pytest.approx(max(0.0, expected), abs=1e-4)


def test_a_foreign_element_earns_nothing(pair: dict, verifier: SurrogateVerifier) -> None:
    pair["elements"] = ["Ti", "O"]
    [grade] = verifier.grade(pair, ["Au sg225 <eos>"])
    assert (grade.outcome, grade.reward) == ("scored", 0.0)
    assert "element" in grade.detail["gate"]


def test_equal_inputs_give_equal_grades(pair: dict, verifier: SurrogateVerifier, database: PhaseDatabase) -> None:
    answers = [format_answer(true_labels(pair)), format_answer(true_labels(pair)[::-1]), "nonsense"]
    assert verifier.grade(pair, answers) == SurrogateVerifier(database).grade(pair, answers)
    assert verifier.grade(pair, ["nonsense"])[0].outcome == "invalid"


def test_a_foreign_payload_is_the_callers_error(verifier: SurrogateVerifier) -> None:
    with pytest.raises(ValueError, match="payload"):
        verifier.grade({"phases": []}, ["x"])
