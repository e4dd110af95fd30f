import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def tinker_world(valkey_url, tmp_path):
    from tinker_world import TinkerWorld

    from reflux_kit.redis import open_redis

    async with open_redis(valkey_url) as client:
        await client.flushdb()
    made = TinkerWorld(valkey_url, tmp_path)
    async with made.peers_serving():
        yield made
