"""The one script of the store: lua/*.lua in their order, called with JSON."""

import json
from importlib import resources
from typing import Any

import redis.asyncio


class StoreScript:
    """Runs operations under one key prefix, each atomic."""

    def __init__(self, client: redis.asyncio.Redis, prefix: str) -> None:
        folder = resources.files("reflux_sandbox").joinpath("lua")
        parts = sorted((part for part in folder.iterdir() if part.name.endswith(".lua")), key=lambda part: part.name)
        self._script: Any = client.register_script("\n".join(part.read_text() for part in parts))
        self._prefix = prefix

    async def __call__(self, operation: str, texts: list[str] | None = None, **arguments: Any) -> Any:
        """The answer of `operations.<operation>`; `texts` travel beside the JSON, for what is large."""
        # Half a surrogate pair in what a verifier says has no UTF-8: it must not fail the calls that share this one.
        document = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
        return await self._script(keys=[self._prefix], args=[operation, document, *(texts or ())])
