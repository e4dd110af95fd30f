"""Open calls of those who listen to the broker: replicas for their events, owners of memory for leases on it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """Last item of a stream."""

    reason: str


class StreamEnded(Exception):
    """The broker ended the stream; the text says why."""


@dataclass(eq=False)
class Stream(Generic[T]):
    """One listener's messages in order."""

    messages: "asyncio.Queue[T | _End]" = field(default_factory=asyncio.Queue)

    def send(self, message: T) -> None:
        """Queues a message."""
        self.messages.put_nowait(message)

    def end(self, reason: str) -> None:
        """Ends the stream after what was queued."""
        self.messages.put_nowait(_End(reason))

    async def read(self) -> AsyncIterator[T]:
        """The messages. Raises `StreamEnded`."""
        while not isinstance(message := await self.messages.get(), _End):
            yield message
        raise StreamEnded(message.reason)


class Listeners(Generic[T]):
    """Streams by who listens; with `single` a new stream of somebody ends the old one."""

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._streams: dict[tuple[str, str], list[Stream[T]]] = {}

    def open(self, *who: str) -> Stream[T]:
        """A new stream for `who`: a name, and a second one where it has several processes."""
        key = _key(who)
        streams = self._streams.setdefault(key, [])
        if self._single:
            for old in streams:
                old.end("another stream of the process took over")
            streams.clear()
        streams.append(Stream())
        return streams[-1]

    def close(self, stream: Stream[T], *who: str) -> bool:
        """Forgets a stream; False when another one had taken its place."""
        streams = self._streams.get(_key(who), [])
        if stream not in streams:
            return False
        streams.remove(stream)
        if not streams:
            del self._streams[_key(who)]
        return True

    def of(self, *who: str) -> Iterable[Stream[T]]:
        """The open streams of somebody."""
        return tuple(self._streams.get(_key(who), ()))


def _key(who: tuple[str, ...]) -> tuple[str, str]:
    return who[0], who[1] if len(who) > 1 else ""
