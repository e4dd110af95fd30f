"""Group commit: calls that come while one is on its way travel together in the next."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Coalescer(Generic[A, R]):
    """A lone call goes at once; under load one round trip, and one fsync of Redis, serves up to `most` calls.

    An error of `commit` is the error of every call in it.
    """

    def __init__(self, commit: Callable[[list[A]], Awaitable[list[R]]], most: int = 128) -> None:
        self._commit = commit
        self._most = most
        self._pending: list[tuple[A, asyncio.Future[R]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, argument: A) -> R:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((argument, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        while self._pending:
            batch, self._pending = self._pending[: self._most], self._pending[self._most :]
            try:
                results = await self._commit([argument for argument, _ in batch])
            except Exception as error:  # task boundary: each caller gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
