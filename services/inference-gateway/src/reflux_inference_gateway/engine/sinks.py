"""Who waits for which events of the engine's thread. Used in the event loop only."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[str, str]
"""Model and request id: callers of different models may choose the same ids."""


class Sinks(Generic[T]):
    """Owns a queue per open request. A request is known by a ticket, since an id may come again before its end."""

    def __init__(self) -> None:
        self._sinks: dict[str, asyncio.Queue[list[T]]] = {}
        self._tickets: dict[Key, set[str]] = {}
        self._numbers = itertools.count()

    @contextmanager
    def opened(self, key: Key) -> Iterator[tuple[str, asyncio.Queue[list[T]]]]:
        """A new ticket and its queue, until the block ends; an empty list in the queue says that no more will come."""
        ticket, sink = f"{key[1]}#{next(self._numbers)}", asyncio.Queue[list[T]]()
        self._sinks[ticket] = sink
        self._tickets.setdefault(key, set()).add(ticket)
        try:
            yield ticket, sink
        finally:
            del self._sinks[ticket]
            self._tickets[key].discard(ticket)
            if not self._tickets[key]:
                del self._tickets[key]

    def tickets(self, key: Key) -> tuple[str, ...]:
        """Those that are open."""
        return tuple(self._tickets.get(key, ()))

    def deliver(self, batch: Iterable[tuple[str, T]]) -> None:
        """Hands events to whoever still waits for them, all of one ticket together."""
        grouped: dict[str, list[T]] = {}
        for ticket, event in batch:
            grouped.setdefault(ticket, []).append(event)
        for ticket, events in grouped.items():
            if ticket in self._sinks:
                self._sinks[ticket].put_nowait(events)

    def end(self, tickets: Iterable[str] | None = None) -> None:
        """No more will come for these tickets, or for any."""
        for ticket in self._sinks if tickets is None else tickets:
            if ticket in self._sinks:
                self._sinks[ticket].put_nowait([])
