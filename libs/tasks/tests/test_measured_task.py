"""The task of a laboratory's own patterns: problems, splits and payloads from a folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from reflux_tasks.options import InvalidOption
from reflux_tasks.registry import create_task
from reflux_tasks.xrd.measured_answers import parse_measured_answer
from reflux_tasks.xrd.measured_task import MeasuredTask, rounded
from reflux_tasks.xrd.structure_files import SHIPPED

MIXTURES = ("TiO2_*", "V2O5_*-ZnO_*", "NiO_*")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, xrd_data: Path) -> MeasuredTask:
    """Both scans of three mixtures, five candidates."""
    cache = tmp_path_factory.mktemp("cache")
    patterns, candidates = cache / "xrd-measured" / "patterns", cache / "xrd-measured" / "candidates"
    patterns.mkdir(parents=True)
    candidates.mkdir()
    for mixture in MIXTURES:
        for scan in (xrd_data / "measured").glob(f"{mixture}min.xrdml"):
            shutil.copy(scan, patterns)
    for name in ("TiO2", "ZnO", "V2O5", "NiO", "La(OH)3"):
        shutil.copy(SHIPPED / f"{name}.cif", candidates)
    task = create_task("xrd-measured", 3, cache)
    assert isinstance(task, MeasuredTask)
    return task


def test_mixtures_are_held_out_with_all_of_their_scans(lab: MeasuredTask) -> None:
    record = json.loads(json.dumps(lab.split_record()))
    train, held = ({name.split("--")[0] for name in record[f"{part}_scans"]} for part in ("training", "heldout"))
    assert (len(train), len(held)) == (2, 1)
    assert not train & held
    assert len(record["training_scans"] + record["heldout_scans"]) == 6


def test_problems_are_a_function_of_their_place_and_end_in_the_grammar(lab: MeasuredTask) -> None:
    for split, index in (("warmup", 0), ("train", 5), ("heldout", 1)):
        problem, again = lab.problem(split, index), lab.problem(split, index)
        np.testing.assert_array_equal(problem.thinned.counts, again.thinned.counts)
        prompt, answer = lab.prompt_ids(problem), lab.answer_words(problem)
        assert prompt == lab.prompt_ids(again)
        assert len(prompt) == 19
        assert len(lab.answer_ids(problem)) <= lab.max_answer_words
        weighed = lab.scans[problem.scan].weighed
        parsed = parse_measured_answer(" ".join(answer))
        assert set(parsed.phases) == set(weighed)
        assert parsed.fractions is not None
        for name, claim in zip(parsed.phases, parsed.fractions, strict=True):
            assert claim == pytest.approx(weighed[name], abs=0.05)
    with pytest.raises(ValueError, match="no problem"):
        lab.problem("train", -1)


def test_the_right_answer_of_a_problem_earns_most_of_the_reward(lab: MeasuredTask, objcryst: Path) -> None:
    problem = lab.problem("train", 0)
    [grade] = lab.verifiers["measured"].grade(
        json.loads(json.dumps(lab.truth(problem))), [" ".join(lab.answer_words(problem))]
    )
    assert grade.detail["accepted"]
    assert grade.detail["fractions"] == 1.0
    assert grade.reward > 0.8


def test_a_folder_that_cannot_be_used_is_named_with_the_way_out(tmp_path: Path, xrd_data: Path) -> None:
    empty = create_task("xrd-measured", 0, tmp_path)
    assert "measured" in empty.verifiers, "the verifier needs no patterns"
    with pytest.raises(InvalidOption, match=r"put scans such as .* into .*xrd-measured/patterns"):
        empty.problem("train", 0)
    patterns = tmp_path / "xrd-measured" / "patterns"
    patterns.mkdir(parents=True)
    for scan in (xrd_data / "measured").glob("TiO2_*min.xrdml"):
        shutil.copy(scan, patterns)
    with pytest.raises(InvalidOption, match="two are the least"):
        create_task("xrd-measured", 0, tmp_path).problem("train", 0)


@pytest.mark.parametrize("fractions", [[0.4, 0.6], [1.0], [0.01, 0.99], [1 / 3, 1 / 3, 1 / 3], [0.02, 0.03, 0.95]])
def test_rounded_fractions_add_up(fractions: list[float]) -> None:
    steps = rounded(fractions)
    assert sum(steps) == 20
    assert min(steps) >= 1
    assert max(abs(step / 20 - fraction) for step, fraction in zip(steps, fractions, strict=True)) <= 0.08
