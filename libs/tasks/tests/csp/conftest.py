"""One CHGNet and one set of references for all tests: importing the potential takes seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reflux_tasks.chemistry.mlip import load_model
from reflux_tasks.csp.task import CspProblem, CspTask
from reflux_tasks.verify import VerifierUnavailable


@pytest.fixture(scope="session")
def csp(cache_dir: Path) -> CspTask:
    return CspTask.create(0, cache_dir, {})


@pytest.fixture(scope="session")
def chgnet() -> Any:
    try:
        return load_model()
    except VerifierUnavailable as error:
        pytest.skip(f"CHGNet: {error}")


@pytest.fixture(scope="session")
def problem_of(csp: CspTask) -> Callable[[str], CspProblem]:
    """Makes the training problem about a known structure."""
    places = {reference.name: place for place, reference in enumerate(csp.references)}
    return lambda name: CspProblem("train", 0, places[name])


@pytest.fixture(scope="session")
def rutile(csp: CspTask, problem_of: Callable[[str], CspProblem]) -> dict[str, Any]:
    """Payload of TiO2."""
    return csp.truth(problem_of("TiO2_136"))
