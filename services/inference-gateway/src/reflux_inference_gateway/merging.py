"""Several streams as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


_MAX_AHEAD = 32
"""Items that wait for the consumer: every wait of a stream for it costs two turns of the loop."""


class _End:
    """A stream is over, well or by an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all streams; the first error of one closes the others and is raised.

    Streams run ahead of the consumer by a few items. Closing the iterator closes all streams; each is advanced and
    closed in one task of its own. (No TaskGroup: it would cancel whoever runs the consumer, which need not be waiting
    here.)
    """
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=_MAX_AHEAD)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    open_streams = len(tasks)
    try:
        while open_streams:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                open_streams -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], queue: "asyncio.Queue[T | _End]") -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put(item)
    except Exception as error:  # task boundary: the consumer raises it
        await queue.put(_End(error))
    else:
        await queue.put(_End())
