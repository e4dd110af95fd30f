"""Real engines in environments of their own: left out of `make test`, run by `make test-engines`."""

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

_FIGURES: dict[str, list[float]] = {}
_BARS = {"vllm_pause_s": 0.5}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder's tests unless `make test-engines` asks for them."""
    if os.environ.get("REFLUX_TEST_ENGINES"):
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="real vLLM and SGLang servers: `make test-engines`"))


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M in bfloat16; deploy/engines/model.sh makes it."""
    folder = Path(os.environ["REFLUX_TEST_ENGINES"]).resolve()
    assert (folder / "model.safetensors").is_file(), f"no model in {folder}"
    return folder


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, list[float]]]:
    """Measured seconds by name; the end of the session prints their medians."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One JSON object, like the benchmarks; a missed bar is told, the machine may be busy."""
    if not _FIGURES:
        return
    terminalreporter.section("figures")
    for name, seconds in sorted(_FIGURES.items()):
        bar = f", bar {_BARS[name]} s" if name in _BARS else ""
        spread = f"{min(seconds):.3f} to {max(seconds):.3f} s in {len(seconds)} commits"
        terminalreporter.write_line(f"{name}: {statistics.median(seconds):.3f} ({spread}{bar})")
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in sorted(_FIGURES.items())}
    terminalreporter.write_line(json.dumps({"bench": "engines", "figures": medians}))
