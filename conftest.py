"""Says at the end of a test session which tests were left out, and how to run them."""

import pytest

_left_out: list[str] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remembers long tests that were deselected."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    _left_out.extend(f"{item.path.name}::{getattr(item, 'originalname', item.name)}" for item in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per long test that this session did not run."""
    if not _left_out:
        return
    terminalreporter.section("left to `make soak`: long versions of tests that ran here with fewer cases")
    for name in sorted(set(_left_out)):
        terminalreporter.write_line(f"{name} ({_left_out.count(name)})")
