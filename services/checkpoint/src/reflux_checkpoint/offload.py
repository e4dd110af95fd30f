"""Blocking store work away from the event loop, with the store's errors turned into those that clients know."""

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from reflux_kit.errors import InvalidRequest, Unavailable
from reflux_storage.errors import InvalidKey, StoreUnavailable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Offload:
    """A bounded pool: with the store away calls wait for a place and end by their own deadlines."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reflux-store")

    async def run(self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Runs `work` in a thread; raises `Unavailable` when the store does not answer."""
        context = contextvars.copy_context()  # the trace goes along
        with _translated():
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: context.run(work, *args, **kwargs)
            )

    def close(self) -> None:
        """Drops what has not started; running calls end by the store's own bounds."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable as error:
        raise Unavailable(f"the object store does not answer: {error}", dependency="object-store") from None
    except InvalidKey as error:
        raise InvalidRequest(str(error)) from None
