"""The installed tasks' own verifiers in confined children, down to the refinement by the system's interpreter."""

import json

import numpy as np
import pytest
import pytest_asyncio

from reflux_sandbox.execution import GradeSession
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_tasks.registry import create_task
from reflux_tasks.xrd.profile import pseudo_voigt_sum, strained_lines
from reflux_tasks.xrd.structure_files import SHIPPED, read_file

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cache_folder(request):
    """Outlives the test run: the phases take seconds to build (libs/tasks has the same folder)."""
    return request.config.cache.mkdir("reflux-xrd-phases")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolation(namespaces, isolation_options, cache_folder):
    options = isolation_options(
        graders="reflux_sandbox.isolation.graders",
        cache_folder=str(cache_folder),
        import_folders=(),
        idle_target=1,
        only_families=("xrd-phase-id", "xrd-measured"),
    )
    started = PreforkIsolation(**options)
    await started.start()
    yield started
    await started.close()


@pytest.mark.parametrize("fidelity", ["label", "surrogate", "full"])
async def test_the_xrd_verifiers_grade_in_a_child(isolation, cache_folder, fidelity):
    name = f"xrd-phase-id/{fidelity}"
    for reason in isolation.reasons:
        if f"verifier {name} is not usable" in reason:
            pytest.skip(reason)
    task = create_task("xrd-phase-id", 0, cache_folder)
    problem = task.problem("heldout", 3)
    answers = [task.decode(task.answer_ids(problem)), "no answer at all"]
    profile = next(info.profile for info in isolation.verifiers if info.name == name)
    async with GradeSession(isolation, profile, 1 << 30, 120, family="xrd-phase-id") as session:
        answer = await session.grade(name, json.dumps(task.truth(problem)), answers)
    assert [grade["outcome"] for grade in answer["grades"]] == ["scored", "invalid"], answer
    assert answer["grades"][0]["reward"] > 0.5


async def test_a_measured_pattern_is_refined_in_a_child(isolation):
    """Zincite as counts over angles; one answer names it with its share, one gives its structure as CIF."""
    name = "xrd-measured/measured"
    for reason in isolation.reasons:
        if f"verifier {name} is not usable" in reason:
            pytest.skip(reason)
    zincite = read_file(SHIPPED / "ZnO.cif")
    angles = np.arange(15.0, 75.0, 0.05)
    inverse_2d, intensity = strained_lines(zincite.phase, np.ones(3))
    widths = np.full(len(inverse_2d), 0.15)
    counts = 50 + 3000 * pseudo_voigt_sum(angles, inverse_2d, intensity, widths=widths, eta=0.5, zero_shift=0.0)
    payload = {"two_theta_degrees": angles.round(4).tolist(), "counts": counts.round().tolist()}
    answers = ["ZnO 1 <eos>", zincite.text, "NiO 1 <eos>", "ZnO 1 <sep> <eos>"]
    [info] = [info for info in isolation.verifiers if info.name == name]
    async with GradeSession(isolation, info.profile, 1 << 30, 120, family=info.family) as session:
        answer = await session.grade(name, json.dumps(payload), answers)
    assert [grade["outcome"] for grade in answer["grades"]] == ["scored", "scored", "scored", "invalid"], answer
    claimed, drawn, wrong, _ = (grade["reward"] for grade in answer["grades"])
    assert claimed > 0.8
    assert drawn == pytest.approx(0.7 * claimed)
    assert wrong < 0.1


async def test_a_payload_of_another_task_is_an_error_not_a_grade(isolation):
    async with GradeSession(isolation, "grade", 1 << 30, 120, family="xrd-phase-id") as session:
        answer = await session.grade("xrd-phase-id/label", "{}", ["x"])
    assert answer["error"] == "payload"
