"""CHGNet and Quantum ESPRESSO inside the real prefork pool: a forked torch, no sockets, no writable folder but /box."""

import json

import pytest
import pytest_asyncio

from reflux_sandbox.execution import GradeSession
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_tasks.csp.task import CspProblem
from reflux_tasks.registry import create_task

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = "1 PbO 1 TiO2 to 1 at 1000 <eos>"


@pytest.fixture(scope="module")
def cache_folder(request):
    """Outlives the test run, and is that of the other tests of real verifiers."""
    return request.config.cache.mkdir("reflux-xrd-phases")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolation(namespaces, isolation_options, cache_folder, here):
    create_task("crystal-structure", 0, cache_folder).problem("train", 0)  # a child cannot write the cache
    options = isolation_options(
        graders="chemistry_graders", cache_folder=str(cache_folder), import_folders=(here,), idle_target=1
    )
    started = PreforkIsolation(**options)
    await started.start()
    yield started
    await started.close()


async def grade(isolation, name, payload, answers):
    for reason in isolation.reasons:
        if f"verifier {name} is not usable" in reason:
            pytest.skip(reason)
    (info,) = (info for info in isolation.verifiers if info.name == name)
    async with GradeSession(isolation, info.profile, 1 << 30, 600, family=info.family) as session:
        answer = await session.grade(name, json.dumps(payload), answers)
    assert "grades" in answer, answer
    return answer["grades"]


async def test_a_forked_chgnet_leaves_no_warning_about_threads(isolation):
    assert not [reason for reason in isolation.reasons if "threads" in reason]


@pytest.mark.parametrize("fidelity", ["rule", "surrogate", "relaxed", "full"])
async def test_crystal_structures_are_graded_in_a_child(isolation, cache_folder, fidelity):
    task = create_task("crystal-structure", 0, cache_folder)
    (place,) = (i for i, reference in enumerate(task.references) if reference.name == "AlB2_191")
    problem = CspProblem("train", 0, place)
    answers = [" ".join(task.answer_words(problem)), "no answer at all"]
    right, broken = await grade(isolation, f"crystal-structure/{fidelity}", task.truth(problem), answers)
    assert (right["outcome"], broken["outcome"]) == ("scored", "invalid"), (right, broken)
    assert right["reward"] > 0.9, right
    if fidelity == "full":
        assert right["figures"]["dft"] == 1, right


@pytest.mark.parametrize("fidelity", ["rule", "surrogate", "full", "dft"])
async def test_recipes_are_graded_in_a_child(isolation, cache_folder, fidelity):
    truth = {"target": "PbTiO3", "available": ["PbO", "TiO2"]}
    right, broken = await grade(isolation, f"synthesis-planning/{fidelity}", truth, [RECIPE, "no answer at all"])
    assert (right["outcome"], broken["outcome"]) == ("scored", "invalid"), (right, broken)
    assert right["reward"] > 0.5, right
    if fidelity == "dft":
        assert right["figures"]["dft"] == 1, right


async def test_a_huge_or_undecodable_answer_is_invalid_and_harms_nobody(isolation, cache_folder):
    task = create_task("crystal-structure", 0, cache_folder)
    truth = task.truth(task.problem("train", 0))
    grades = await grade(isolation, "crystal-structure/surrogate", truth, ["Ti " * 1_000_000, "\ufffd\x00", ""])
    assert [row["outcome"] for row in grades] == ["invalid"] * 3
