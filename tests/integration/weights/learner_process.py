"""The learner as a process of its own, as a run starts it."""

import asyncio
import os
import re
import sys

_ADDRESS = re.compile(rb"serves gRPC on (\S+)")


class LearnerProcess:
    """One `reflux-learner`; `start` and `kill` may follow each other again and again."""

    def __init__(self, run: str, broker_address: str) -> None:
        self._environment = {
            "REFLUX_RUN": run,
            "REFLUX_BROKER_ADDRESS": broker_address,
            "REFLUX_TRAINER_ADDRESS": "127.0.0.1:1",  # nobody trains here: calls come from the test
            "REFLUX_LEARNER_LISTEN": "127.0.0.1:0",
            "REFLUX_LEARNER_HTTP_LISTEN": "",
        }
        self._process: asyncio.subprocess.Process | None = None
        self._drained: asyncio.Task[bytes] | None = None

    async def start(self) -> str:
        """Starts the process; returns its address once it serves."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "reflux_trainer.learner.main",
            env={**os.environ, **self._environment},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr
        seen = b""
        async with asyncio.timeout(120):
            while not (found := _ADDRESS.search(seen)):
                line = await process.stderr.readline()
                assert line, f"the learner did not start:\n{seen.decode()}"
                seen += line
        self._drained = asyncio.create_task(process.stderr.read())
        return found[1].decode()

    async def kill(self) -> None:
        """Ends it with SIGKILL."""
        if self._process:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        if self._drained:
            await self._drained
        self._process = self._drained = None
