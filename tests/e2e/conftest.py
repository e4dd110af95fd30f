"""One whole stack for all end-to-end tests, with a stack secret, so that every call is authenticated."""

import os
from pathlib import Path

import pytest
from e2e_stack import Harness
from e2e_tinker import offered

from reflux_client import stack

SECRET = "end-to-end secret of the tests"


@pytest.fixture(scope="package", autouse=True)
def _one_task(request):
    """Without the slow tests, which train other tasks too, stacks load the verifiers of one task: seconds less."""
    if request.config.option.markexpr != "not slow":
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("REFLUX_SANDBOX_TASKS", "xrd-phase-id")
        yield


@pytest.fixture(scope="session")
def harness(tmp_path_factory):
    """The running stack; ends with the test session, or with its process."""
    folder = tmp_path_factory.mktemp("stack")
    before = dict(os.environ)
    os.environ |= {
        "REFLUX_STATE_DIR": str(folder),
        "REFLUX_TRAINER_RUNS_DIR": str(folder / "runs"),
        "REFLUX_STACK_SECRET": SECRET,
        **offered(folder / "tinker"),
        "REFLUX_CACHE_DIR": str(Path(before.get("REFLUX_CACHE_DIR", "")).resolve())
        if "REFLUX_CACHE_DIR" in before
        else "",
    }
    if not os.environ["REFLUX_CACHE_DIR"]:
        del os.environ["REFLUX_CACHE_DIR"]
    try:
        stack.start(folder, die_with_parent=True)
        yield Harness(folder)
    finally:
        stack.stop(folder)
        os.environ.clear()
        os.environ.update(before)
