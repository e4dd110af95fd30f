"""Fixtures of the conformance suite: a case is one backend in one set-up, always between two real processes."""

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules, although pytest runs in importlib mode

from owner_process import NIXL, SIZE, Owner

from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment

HAS_UCX_WHEEL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
CASES = ["shm", "ucx", "ucx-segments", "ucx-tcp", "tcp", *NIXL]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Backend name; "ucx-segments" maps its owner's memory, "ucx-tcp" is in error mode PEER, as elsewhere."""
    name = request.param
    if name == "ucx-segments":
        monkeypatch.setenv("REFLUX_TRANSFER_UCX_SEGMENTS", "on")
    if name == "ucx-tcp":
        monkeypatch.setenv("REFLUX_TRANSFER_UCX_TRANSPORTS", "tcp,self")
    return name.partition("-")[0]


@pytest.fixture
def backend(case: str) -> Iterator[TransferBackend]:
    """A backend that does not open is an error: its whole suite would be missing unseen."""
    if case == "ucx" and not HAS_UCX_WHEEL:
        pytest.skip("libucx-cu12 has no wheel for this platform")
    opened = open_backend(case, TransferEnvironment())
    yield opened
    opened.close()


@pytest.fixture
def owner(backend: TransferBackend) -> Iterator[Owner]:
    process = Owner(backend.name, SIZE)
    yield process
    process.close()
