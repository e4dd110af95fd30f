"""The Lua functions of the queue: read once, run by hash, loaded again by themselves after a restart of Redis."""

from importlib import resources
from typing import Any

from redis.exceptions import ResponseError

from reflux_kit.errors import Conflict
from reflux_trainer.queue.client import RedisClient

_NAMES = ("begin", "issue", "take", "heartbeat", "store", "emit", "fail", "close", "log_step", "trim")
_SOURCES = {name: resources.files("reflux_trainer.queue").joinpath("lua", f"{name}.lua").read_text() for name in _NAMES}


class Fenced(Conflict):
    """A newer attempt of the trainer owns the run."""

    reason = "FENCED"


class Scripts:
    """Runs the functions on one client."""

    def __init__(self, redis: RedisClient) -> None:
        self._scripts = {name: redis.register_script(source) for name, source in _SOURCES.items()}

    async def run(self, name: str, keys: list[str], arguments: list[Any]) -> Any:
        """Raises `Fenced` for a superseded trainer and RedisError for everything that Redis reports."""
        try:
            return await self._scripts[name](keys=keys, args=arguments)
        except ResponseError as error:
            if "FENCED" in str(error):
                raise Fenced("a newer attempt of the trainer owns this run") from None
            raise
