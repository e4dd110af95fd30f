import sys
from pathlib import Path

import pytest

# Tests are imported by path (importlib mode), so that helper modules beside them need this.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def late_world(world):
    """A trainer with its peers, and ladders beside them."""
    from late_peers import Rungs, ladders_beside

    world.rungs = Rungs()
    async with ladders_beside(world) as address:
        world.peers = address
        yield world
