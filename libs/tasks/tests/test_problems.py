import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.options import InvalidOption
from reflux_tasks.registry import UnknownTask, create_task, task_names
from reflux_tasks.task import SPLITS
from reflux_tasks.xrd.patterns import LEVELS, Level, make_pattern, merge_peaks
from reflux_tasks.xrd.phases import line_angles
from reflux_tasks.xrd.task import XrdTask

LEVEL_OF_THE_SHEET = Level(
    strain=0.01, anisotropy=0.003, zero_shift_degrees=0.1, jitter=0.35, dropped=0.12, max_spurious=1
)


def payloads(task: XrdTask, split: str, count: int) -> list[str]:
    return [json.dumps(task.truth(task.problem(split, index))) for index in range(count)]


def test_the_registry_creates_the_task_by_its_name(cache_dir: Path) -> None:
    assert "xrd-phase-id" in task_names()
    assert isinstance(create_task("xrd-phase-id", 3, cache_dir, {"num_phases": 16}), XrdTask)
    with pytest.raises(UnknownTask, match="xrd-phase-id"):
        create_task("xrd-phase-di", 0, cache_dir)


def test_the_vocabulary_is_that_of_the_recipe(task: XrdTask) -> None:
    assert len(task.words) == len(set(task.words)) == 347
    assert task.words[:6] == ("<pad>", "<eos>", "<sep>", "<ans>", "<noel>", "<nopk>")
    digest = hashlib.sha256(" ".join(task.words).encode()).hexdigest()
    assert digest.startswith("dbf33b1b87c64506"), "token ids moved: old model folders no longer fit"


def test_the_phases_are_the_fixed_subset(task: XrdTask) -> None:
    assert len(task.phases) == 128
    assert len({frozenset(phase.elements) for phase in task.phases}) == 105
    assert len({phase.formula for phase in task.phases}) == 108
    assert sum(len(phase.elements) == 1 for phase in task.phases) == 24


def test_the_noisy_level_is_that_of_the_recipe() -> None:
    assert LEVELS["noisy"] == LEVEL_OF_THE_SHEET
    assert LEVELS["clean"] == Level()


def test_problems_depend_on_seed_split_and_index_alone(cache_dir: Path, task: XrdTask) -> None:
    again = XrdTask.create(0, cache_dir, {})
    for split in SPLITS:
        assert again.problem(split, 7).phase_ids == task.problem(split, 7).phase_ids
        assert payloads(again, split, 20) == payloads(task, split, 20)
    other = XrdTask.create(1, cache_dir, {})
    assert payloads(other, "train", 20) != payloads(task, "train", 20)
    assert payloads(other, "heldout", 20) == payloads(task, "heldout", 20), "runs are judged on equal problems"


def test_no_two_splits_share_a_pattern(cache_dir: Path) -> None:
    noisy = XrdTask.create(0, cache_dir, {"warmup_level": "noisy"})
    prompts = {split: {noisy.prompt_text(noisy.problem(split, i)) for i in range(300)} for split in SPLITS}
    assert not prompts["warmup"] & prompts["train"]
    assert not prompts["heldout"] & (prompts["train"] | prompts["warmup"])


def test_held_out_pairs_are_never_trained_on(cache_dir: Path) -> None:
    task = XrdTask.create(0, cache_dir, {"warmup_mixtures": 1.0, "train_mixtures": 1.0, "heldout_mixtures": 1.0})
    held_out = {frozenset(pair) for pair in task.pairs[1].tolist()}
    assert len(held_out) / sum(map(len, task.pairs)) == pytest.approx(0.25, abs=0.02)
    for index in range(200):
        assert frozenset(task.problem("heldout", index).phase_ids) in held_out
        assert frozenset(task.problem("train", index).phase_ids) not in held_out
        assert frozenset(task.problem("warmup", index).phase_ids) not in held_out
    assert len(task.split_record()["heldout_pairs"]) == len(held_out)
    assert json.loads(json.dumps(task.split_record())) == task.split_record()


@pytest.mark.parametrize(("split", "share"), [("warmup", 0.2), ("train", 0.3), ("heldout", 0.3)])
def test_the_share_of_mixtures_is_that_of_the_recipe(task: XrdTask, split: str, share: float) -> None:
    mixed = [len(task.problem(split, index).phase_ids) == 2 for index in range(600)]
    assert np.mean(mixed) == pytest.approx(share, abs=0.06)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SPLITS), st.integers(0, 2**40))
def test_every_problem_is_well_formed(task: XrdTask, split: str, index: int) -> None:
    problem = task.problem(split, index)
    prompt, answer = task.prompt_words(problem), task.answer_words(problem)
    truth = task.truth(problem)
    assert len(prompt) == 19
    assert prompt[-1] == "<ans>"
    assert len(answer) <= task.max_answer_words
    assert all(0 <= token_id < 347 for token_id in task.prompt_ids(problem) + task.answer_ids(problem))
    assert 1 <= len(problem.pattern.two_theta) <= 12
    assert (np.diff(problem.pattern.intensity) <= 0).all()
    assert ((problem.pattern.two_theta > 10) & (problem.pattern.two_theta < 90)).all()
    assert (np.abs(problem.pattern.cell_scales - 1) <= 0.013 + 1e-12).all()
    assert len(problem.elements) <= 6
    assert list(problem.elements) == sorted(set(problem.elements))
    assert json.loads(json.dumps(truth)) == truth
    [grade] = task.verifiers["label"].grade(truth, [answer])
    assert (grade.outcome, grade.reward) == ("scored", 1.0)


def test_clean_patterns_have_the_ideal_lines(task: XrdTask) -> None:
    phase = task.phases[0]
    pattern = make_pattern([phase], LEVELS["clean"], np.random.default_rng(0))
    ideal = line_angles(phase.lattice, phase.strongest[0])
    merged, _ = merge_peaks(ideal, phase.strongest[1])
    assert all(np.abs(merged - angle).min() < 1e-9 for angle in pattern.two_theta)


def test_strain_keeps_the_crystal_system(task: XrdTask) -> None:
    rng = np.random.default_rng(0)
    for phase in task.phases:
        scale = make_pattern([phase], LEVELS["noisy"], rng).cell_scales[0]
        if phase.system == "cubic":
            assert np.ptp(scale) == 0
        if phase.system in ("tetragonal", "trigonal", "hexagonal"):
            assert scale[0] == scale[1]


def test_the_controls_hide_one_side_of_the_prompt_only(cache_dir: Path, task: XrdTask) -> None:
    elements_only = XrdTask.create(0, cache_dir, {"peaks_hidden": True})
    peaks_only = XrdTask.create(0, cache_dir, {"elements_hidden": True})
    full = task.prompt_words(task.problem("train", 5))
    assert elements_only.prompt_words(elements_only.problem("train", 5)) == [*full[:6], *["<nopk>"] * 12, "<ans>"]
    assert peaks_only.prompt_words(peaks_only.problem("train", 5)) == [*["<noel>"] * 6, *full[6:]]


def test_close_angles_start_with_close_embeddings(task: XrdTask) -> None:
    first, rows = task.initial_embedding(128, 0)
    assert task.words[first] == "t0"
    assert rows.shape == (200, 128)
    distance = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    assert np.diagonal(distance, 1).mean() < 0.6 * np.diagonal(distance, 40).mean()


@pytest.mark.parametrize(
    ("options", "key", "way_out"),
    [
        ({"peaks_hiden": True}, "peaks_hiden", "peaks_hidden"),
        ({"num_phases": "128"}, "num_phases", "128"),
        ({"num_phases": 1000}, "num_phases", "2 to 255"),
        ({"train_level": "loud"}, "train_level", "'noisy'"),
        ({"train_mixtures": 1.5}, "train_mixtures", "0.3"),
        ({"peaks_hidden": 1}, "peaks_hidden", "bool"),
        ({"peaks_hidden": True, "elements_hidden": True}, "elements_hidden", "not both"),
        ({"max_distractors": 6}, "max_distractors", "0 to 5"),
    ],
)
def test_a_bad_option_is_named_with_a_value_that_works(
    cache_dir: Path, options: dict[str, object], key: str, way_out: str
) -> None:
    with pytest.raises(InvalidOption, match=key) as caught:
        XrdTask.create(0, cache_dir, options)
    assert caught.value.value == options[key]
    assert way_out in str(caught.value)


def test_problems_outside_the_splits_are_refused(task: XrdTask) -> None:
    with pytest.raises(ValueError, match="test/0"):
        task.problem("test", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train/-1"):
        task.problem("train", -1)
