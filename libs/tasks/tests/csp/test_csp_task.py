"""Problems, splits and words of the task."""

import json
from pathlib import Path

import pytest

from reflux_tasks.chemistry import espresso
from reflux_tasks.chemistry.energies import competing_energy
from reflux_tasks.csp.references import Reference, energies
from reflux_tasks.csp.task import CspTask, composition_key
from reflux_tasks.options import InvalidOption
from reflux_tasks.registry import create_task
from reflux_tasks.task import SPLITS


def test_the_registry_creates_the_task(cache_dir: Path) -> None:
    assert isinstance(create_task("crystal-structure", 0, cache_dir), CspTask)
    with pytest.raises(InvalidOption, match="space_group_shown"):
        create_task("crystal-structure", 0, cache_dir, {"space_group_show": True})


def test_problems_depend_on_seed_split_and_index_alone(cache_dir: Path, csp: CspTask) -> None:
    again, other = CspTask.create(0, cache_dir, {}), CspTask.create(1, cache_dir, {})
    for split in SPLITS:
        assert [again.problem(split, i) for i in range(30)] == [csp.problem(split, i) for i in range(30)]
    assert [other.problem("train", i) for i in range(30)] != [csp.problem("train", i) for i in range(30)]
    assert [other.problem("heldout", i) for i in range(30)] == [csp.problem("heldout", i) for i in range(30)]


def test_all_polymorphs_of_a_composition_are_on_one_side(csp: CspTask) -> None:
    trained, held = ({composition_key(csp.references[i].amounts) for i in part} for part in csp.parts)
    assert not trained & held
    assert 0.1 < len(held) / (len(held) + len(trained)) < 0.3
    for split in ("warmup", "train"):
        assert {csp.problem(split, i).reference for i in range(300)} <= set(csp.parts[0])
    assert {csp.problem("heldout", i).reference for i in range(300)} <= set(csp.parts[1])
    assert set(csp.split_record()["heldout_compositions"]) == held


def test_every_answer_is_in_the_vocabulary_and_short_enough(csp: CspTask) -> None:
    known = set(csp.words)
    assert len(known) == len(csp.words)
    for reference in csp.references:
        words = csp.vocabulary.answer(reference)
        assert set(words) <= known, reference.name
        assert len(words) <= csp.max_answer_words
        assert csp.vocabulary.fits(reference)


def test_a_prompt_has_twelve_words_and_the_truth_is_plain_json(csp: CspTask) -> None:
    for split in SPLITS:
        problem = csp.problem(split, 5)
        assert len(csp.prompt_words(problem)) == 12
        truth = csp.truth(problem)
        assert json.loads(json.dumps(truth)) == truth


def test_a_shown_space_group_leaves_its_polymorphs_only(cache_dir: Path) -> None:
    shown = CspTask.create(0, cache_dir, {"space_group_shown": True})
    for index in range(20):
        problem = shown.problem("train", index)
        group = shown.references[problem.reference].phase.space_group
        assert f"sg{group}" in shown.prompt_words(problem)
        assert {row["space_group"] for row in shown.truth(problem)["known"]} == {group}


def test_a_trial_uses_a_part_of_the_structures_and_the_words_of_all(cache_dir: Path, csp: CspTask) -> None:
    small = CspTask.create(0, cache_dir, {"num_phases": 8})
    assert [len(part) for part in small.parts] == [8, 2]
    assert set(small.parts[0]) < set(csp.parts[0])
    assert set(small.parts[1]) < set(csp.parts[1])
    assert small.words == csp.words
    with pytest.raises(InvalidOption, match="num_phases"):
        CspTask.create(0, cache_dir, {"num_phases": -1})


def test_most_polymorphs_that_pw_can_calculate_are_the_hull_themselves(csp: CspTask) -> None:
    """What docs/science-csp.md says of them: their energy above a polymorph is that above all competing phases."""

    def covered(each: Reference) -> bool:
        small = each.primitive_atoms <= espresso.MAX_ATOMS
        return small and espresso.choose_pseudopotentials(each.amounts) is not None

    falling = sorted(csp.references, key=lambda each: -energies()[each.name].energy)
    lowest = {composition_key(each.amounts): each for each in falling}  # the last of a composition stays
    lowest = {key: each for key, each in lowest.items() if covered(each)}
    above = []
    for each in lowest.values():
        hull = competing_energy({name: float(count) for name, count in each.amounts.items()}, list(energies().values()))
        assert hull is not None
        above += [each.name] if energies()[each.name].energy - hull > 1e-6 else []
    assert (sum(map(covered, csp.references)), len(lowest), sorted(above)) == (58, 44, ["Fe2C_58", "Si_96", "TiO2_136"])
