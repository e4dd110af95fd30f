"""The built phase collection (kept between runs of pytest), measured data and the refinement program, when there."""

import os
from pathlib import Path

import pytest

from reflux_tasks.verify import VerifierUnavailable
from reflux_tasks.xrd.database import PhaseDatabase
from reflux_tasks.xrd.refinement import system_python
from reflux_tasks.xrd.structure_files import SHIPPED, Structure, read_folder
from reflux_tasks.xrd.task import XrdTask

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def cache_dir(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    return request.config.cache.mkdir("reflux-xrd-phases")


@pytest.fixture(scope="session")
def task(cache_dir: Path) -> XrdTask:
    return XrdTask.create(0, cache_dir, {})


@pytest.fixture(scope="session")
def mixtures(cache_dir: Path) -> XrdTask:
    return XrdTask.create(0, cache_dir, {"heldout_mixtures": 1.0, "max_distractors": 1})


@pytest.fixture(scope="session")
def database(cache_dir: Path) -> PhaseDatabase:
    return PhaseDatabase(cache_dir)


@pytest.fixture(scope="session")
def shipped() -> dict[str, Structure]:
    """The candidates that come with the task; reading them takes seconds."""
    found, refused = read_folder(SHIPPED)
    assert refused == {}
    return found


@pytest.fixture(scope="session")
def objcryst() -> Path:
    try:
        return system_python()
    except VerifierUnavailable as error:
        pytest.skip(f"Rietveld refinement: {error}")


@pytest.fixture(scope="session")
def xrd_data() -> Path:
    folder = Path(os.environ.get("REFLUX_DATA", ROOT.parent / "shared" / "data")) / "xrd"
    if not (folder / "measured").is_dir():
        pytest.skip(f"measured X-ray data: {folder} is not there; set REFLUX_DATA")
    return folder
