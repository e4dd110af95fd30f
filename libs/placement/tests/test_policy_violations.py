import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from reflux_placement.policy.config import PolicyConfig

DRIVER = Path(__file__).parents[3] / "benchmarks" / "scheduler" / "violations.py"


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("violations_driver", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_random_events_starve_nobody_and_break_nothing(driver) -> None:
    found = driver.violations(2000, seed=0)
    assert found.total == 0, found.notes
    assert min(found.actions[kind] for kind in ("Start", "Preempt", "Resize", "Replace", "Requeue")) > 0


def test_random_events_are_decided_the_same_way_twice(driver) -> None:
    first, second = (driver.violations(300, seed=5) for _ in range(2))
    assert (first.cycles, first.actions) == (second.cycles, second.actions)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(
    "config", [PolicyConfig(), PolicyConfig(reservations=3, backfill_depth=4, patience_seconds=60)]
)
def test_long_random_events_starve_nobody_and_break_nothing(driver, seed, config) -> None:
    found = driver.violations(30_000, seed, config)
    assert found.total == 0, found.notes
