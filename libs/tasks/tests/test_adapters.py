"""Environments of other libraries as tasks."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.adapters.nemo_gym import gym_task
from reflux_tasks.adapters.rows import Row, RowsTask, spoken
from reflux_tasks.adapters.verifiers_env import verifiers_task
from reflux_tasks.options import InvalidOption
from reflux_tasks.verify import VerificationError, VerifierUnavailable

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / "verifiers_environments"


class Numbers(RowsTask):
    name = "numbers"
    verifiers = {}  # noqa: RUF012
    count = 20

    def read_rows(self, most):
        return [Row(f"q {number}", f"a{number}", {"n": number}) for number in range(self.count)][:most]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(2, 40), st.integers(2, 7), st.integers(0, 3))
def test_each_pass_of_a_split_asks_each_of_its_rows_once(count, every, seed):
    task = Numbers.create(seed, Path("unused"), {"heldout_every": every})
    task.count = count
    held = {task.problem("heldout", index).row for index in range(count)}
    trained = count - len(held)
    for start in (0, trained):
        rows = [task.problem("train", start + index).row for index in range(trained)]
        assert sorted(rows) == sorted(set(range(count)) - held)
    assert held == set(range(0, count, every))


def test_rows_are_text_words_and_truth():
    task = Numbers.create(0, Path("unused"), {})
    problem = task.problem("train", 5)
    assert task.prompt_text(problem) == f"q {problem.row}"
    assert task.truth(problem) == {"n": problem.row}
    assert task.decode(task.answer_ids(problem)) == f"a{problem.row} <eos>"
    assert task.words[:2] == ("<pad>", "<eos>")
    for option in ({"num_rows": 1}, {"heldout_every": 1}, {"typo": 1}):
        with pytest.raises(InvalidOption):
            Numbers.create(0, Path("unused"), option)


def test_the_marks_that_end_an_answer_are_not_part_of_it():
    assert spoken("4 <eos> <pad> <pad>") == "4"
    assert spoken("4<|im_end|>\n") == "4"
    assert spoken(" <eos>4") == " <eos>4"


def test_a_gym_file_becomes_problems_and_its_server_the_verifier(tmp_path):
    rows = [
        {"responses_create_params": {"input": "2 plus 2"}, "expected_answer": "4", "uuid": "a"},
        {"responses_create_params": {"input": [{"role": "system", "content": "Add."}, {"content": [{"text": "1"}]}]}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = gym_task("my-gym", path).create(0, tmp_path, {"heldout_every": 2})
    held, trained = task.problem("heldout", 0), task.problem("train", 0)
    assert (task.prompt_text(held), task.answer_words(held)) == ("2 plus 2", ["4", "<eos>"])
    assert task.prompt_text(trained) == "Add.\n\n1"
    assert task.truth(held) == rows[0]
    with pytest.raises(VerifierUnavailable, match=r"remote\.http"):
        task.verifiers["verify"].grade(task.truth(held), ["4"])
    path.write_text('{"responses_create_params": {}}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1"):
        gym_task("my-gym", path).create(0, tmp_path, {}).problem("train", 0)


class Rubric:
    """What the adapter uses of the library's Rubric."""

    has_group_rewards = False

    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights

    def score_objects(self, state):
        return {"completion": state["completion"], "answer": state["answer"], "state": state, "parser": None}


def environment_of(monkeypatch, rubric):
    module = types.ModuleType("tiny_stand_in")
    rows = [{"prompt": f"{n} plus 1", "answer": str(n + 1), "info": {}} for n in range(4)]
    made = types.SimpleNamespace(rubric=rubric, get_dataset=lambda: rows)
    module.load_environment = lambda: made
    monkeypatch.setitem(sys.modules, "tiny_stand_in", module)
    return verifiers_task("tiny", "owner/tiny-stand-in@1.0").create(0, Path("unused"), {"heldout_every": 2})


def test_weighted_rewards_are_the_grade_and_a_failing_one_is_no_grade(monkeypatch):
    async def correct(completion, answer):
        return completion == answer

    def short(completion):
        return 1 / len(completion)

    group = types.SimpleNamespace(rubrics=[Rubric([correct], [2.0]), Rubric([short], [0.5])])
    task = environment_of(monkeypatch, group)
    problem = task.problem("train", 0)
    (grade,) = task.verifiers["reward"].grade(task.truth(problem), [" ".join(task.answer_words(problem))])
    assert (grade.reward, dict(grade.detail)) == (2.5, {"correct": 1.0, "short": 1.0})
    with pytest.raises(VerificationError, match="short failed: ZeroDivisionError"):
        task.verifiers["reward"].grade(task.truth(problem), ["<eos>"])
    with pytest.raises(ValueError, match="payload"):
        task.verifiers["reward"].grade({}, ["1"])


def test_what_cannot_be_graded_answer_by_answer_is_refused(monkeypatch):
    for rubric, reason in ((Rubric([], []), "no reward"), (Rubric([print], [1.0]), "whole group")):
        rubric.has_group_rewards = reason == "whole group"
        with pytest.raises(VerifierUnavailable, match=reason):
            environment_of(monkeypatch, rubric).verifiers["reward"].prepare()
    missing = verifiers_task("tiny", "no_such_environment").create(0, Path("unused"), {})
    with pytest.raises(VerifierUnavailable, match="does not import"):
        missing.verifiers["reward"].prepare()


@pytest.mark.slow
def test_environments_of_the_real_library_run_unchanged():
    """REFLUX_VERIFIERS_PYTHONS: interpreters of environments with `pip install verifiers==...`, separated by colons."""
    pythons = [python for python in os.environ.get("REFLUX_VERIFIERS_PYTHONS", "").split(":") if python]
    if not pythons:
        pytest.skip("REFLUX_VERIFIERS_PYTHONS names no environment with the verifiers library; its pins are not ours")
    path = os.pathsep.join([str(HERE.parent / "src"), str(ENVIRONMENTS)])
    for python in pythons:
        listed = subprocess.run([python, "-c", "import datasets"], capture_output=True, check=False)
        module = "tiny_first" if listed.returncode == 0 else "tiny_taskset"
        done = subprocess.run(
            [python, str(ENVIRONMENTS / "check_adapter.py"), module],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=170, check=False,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1:] == ["ok"], done.stderr[-2000:]
