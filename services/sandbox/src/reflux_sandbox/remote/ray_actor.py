"""The grader on a node of a Ray cluster; a module of its own, so that Ray refers to it by name."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from reflux_sandbox.remote.node import NodeGrader, open_node


class Grader:
    """An asyncio actor that keeps warm children; `jobs` calls of `grade` overlap. A restarted one starts anew."""

    def __init__(self, values: dict[str, Any], cache_folder: str, jobs: int) -> None:
        self._opening = (values, cache_folder, jobs)
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._node: NodeGrader | None = None

    async def warm(self) -> bool:
        """Starts the isolation. Raises StartupError when this node cannot."""
        async with self._lock:
            if self._node is None:
                self._node = await self._stack.enter_async_context(open_node(*self._opening))
        return True

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, as in NodeGrader; cancelling the call kills the child."""
        await self.warm()
        assert self._node is not None
        return await self._node.grade(request)

    async def close(self) -> None:
        """Ends the children."""
        await self._stack.aclose()
