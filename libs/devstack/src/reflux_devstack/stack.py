"""The local stack as one block: all processes up, watched, and down again, nothing left behind."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from reflux_devstack.layout import MODULES, Layout, choose_layout, redis_ready, service_spec, valkey_spec
from reflux_devstack.processes import ProcessSpec, StackError, Supervised

log = logging.getLogger(__name__)

_GRACE_SECONDS = 15.0
_EXTERNAL_REDIS_SECONDS = 5.0
RECORD = "stack.json"


class Stack:
    """The running processes of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.processes: dict[str, Supervised] = {}
        self.watcher: asyncio.Task[None] | None = None
        """Ends only when a process cannot be kept alive; its exception says which."""

    async def start(self) -> None:
        """Valkey, then all services at once, then the agent; other backends than `local` start agents themselves."""
        services = [service_spec(name, self.layout) for name in MODULES if name != "agent"]
        await self._start_redis()
        await asyncio.gather(*(self._start(spec) for spec in services))
        if os.environ.get("REFLUX_SCHEDULER_BACKEND", "local") == "local":
            await self._start(service_spec("agent", self.layout))
        self.write_record()
        self.watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for process in self.processes.values():
                tasks.create_task(process.watch())

    async def stop(self) -> None:
        """Trainer and agent first, so that nobody reacts to peers that leave; Valkey last."""
        if self.watcher is not None:
            self.watcher.cancel()
            await asyncio.gather(self.watcher, return_exceptions=True)
        first = [self.processes.pop(name) for name in ("trainer", "agent") if name in self.processes]
        last = self.processes.pop("valkey", None)
        for process in first:
            await process.stop(_GRACE_SECONDS)
        await asyncio.gather(*(process.stop(_GRACE_SECONDS) for process in self.processes.values()))
        if last is not None:
            await last.stop(_GRACE_SECONDS)
        (self.layout.state_dir / RECORD).unlink(missing_ok=True)

    def write_record(self) -> None:
        """Tells clients where everything is; readable by the owner only."""
        record = {
            "pid": os.getpid(),
            "redis_url": self.layout.redis_url,
            "grpc": dict(self.layout.grpc),
            "http": dict(self.layout.http),
            "pids": {name: each.process.pid for name, each in self.processes.items() if each.process},
            "restarts": {name: each.restarts for name, each in self.processes.items()},
        }
        path = self.layout.state_dir / RECORD
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(record, indent=2))
        fresh.replace(path)

    async def _start_redis(self) -> None:
        if self.layout.redis_port:
            await self._start(valkey_spec(self.layout))
            return
        try:
            await redis_ready(self.layout.redis_url, _EXTERNAL_REDIS_SECONDS)
        except TimeoutError:
            shown = self.layout.redis_url.rpartition("@")[2]  # never the password
            raise StackError(
                f"the Redis of REFLUX_REDIS_URL ({shown}) does not answer; unset it to embed one"
            ) from None

    async def _start(self, spec: ProcessSpec) -> None:
        logs = self.layout.state_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.processes[spec.name] = Supervised(spec, logs / f"{spec.name}.log", self.write_record)
        await self.processes[spec.name].start()


@asynccontextmanager
async def running_stack(
    state_dir: Path, fixed_http: Mapping[str, int] | None = None, redis_url: str = ""
) -> AsyncIterator[Stack]:
    """Starts a stack, yields it while it is watched, stops it at the end of the block."""
    stack = Stack(choose_layout(state_dir.resolve(), fixed_http or {}, redis_url))
    try:
        await stack.start()
        yield stack
    finally:
        await asyncio.shield(stack.stop())
