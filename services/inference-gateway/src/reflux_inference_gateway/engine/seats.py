"""Adapters that runs attach to this engine: each has arenas, a subscription at the broker and an entry at the gateway.

Who attaches renews its lease by attaching again: a seat whose lease ends is free, whatever became of its run.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from reflux_kit.errors import CapacityExhausted, InvalidRequest, WrongState
from reflux_model.lora import LoraSpec

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
Opened = Callable[[str, LoraSpec], AbstractAsyncContextManager[Callable[[], bool]]]
"""Serves an adapter (model id, shape) while its block runs; what it yields tells whether it still can."""


@dataclass
class _Seat:
    spec: LoraSpec
    opened: "asyncio.Future[Callable[[], bool]]"
    left: asyncio.Event = field(default_factory=asyncio.Event)
    until: float = 0.0
    task: "asyncio.Task[None] | None" = None


class Seats:
    """Owns at most `most` seats of adapters of at most `most_rank` ranks."""

    def __init__(self, most: int, most_rank: int, opened: Opened, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._most_rank, self._opened, self._clock = most, most_rank, opened, clock
        self._seats: dict[str, _Seat] = {}
        self._order = asyncio.Lock()

    @property
    def taken(self) -> tuple[str, ...]:
        """Model ids of the adapters that have a seat."""
        return tuple(self._seats)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Frees seats whose lease ended while the block runs, and all behind it."""
        sweeping = asyncio.create_task(self._sweep(), name="adapter-leases")
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            for name in self.taken:
                await self.detach(name)

    async def attach(self, name: str, spec: LoraSpec, lease_seconds: float) -> None:
        """Gives an adapter a seat, or renews its lease.

        Raises `InvalidRequest` for a rank above the bound, `WrongState` where the name is that of an adapter of another
        shape, or no adapters are served here, and `CapacityExhausted` when all seats are taken.
        """
        if not self._most:
            raise WrongState("this engine serves no adapters: set REFLUX_ENGINE_MAX_ADAPTERS")
        if spec.rank > self._most_rank:
            raise InvalidRequest(f"rank {spec.rank} exceeds the {self._most_rank} that this engine takes", field="rank")
        async with self._order:
            seat = self._seats.get(name)
            if seat is not None and not seat.opened.result()():
                await self._free(name)
                seat = None
            if seat is None:
                seat = await self._seat(name, spec)
            if seat.spec != spec:
                raise WrongState(f"{name} is attached with {seat.spec}, not with {spec}; detach it first")
            seat.until = self._clock() + lease_seconds

    async def detach(self, name: str) -> None:
        """Frees a seat; one that nobody has is no error."""
        async with self._order:
            await self._free(name)

    async def _seat(self, name: str, spec: LoraSpec) -> _Seat:
        if len(self._seats) >= self._most:
            taken = ", ".join(self._seats)
            raise CapacityExhausted(f"all {self._most} seats for adapters are taken, by {taken}; one has to end first")
        seat = _Seat(spec, asyncio.get_running_loop().create_future())
        # An empty context: the deadline and the trace of the call that attaches are not the seat's.
        context = contextvars.Context()
        seat.task = asyncio.create_task(self._sit(name, seat), name=f"seat of {name}", context=context)
        with ExitStack() as undone:
            undone.callback(seat.left.set)  # a call that is cancelled, or whose seat does not open, leaves nobody there
            await asyncio.shield(seat.opened)
            undone.pop_all()
        self._seats[name] = seat
        log.info("adapter %s has seat %d of %d", name, len(self._seats), self._most)
        return seat

    async def _sit(self, name: str, seat: _Seat) -> None:
        try:
            async with self._opened(name, seat.spec) as works:
                seat.opened.set_result(works)
                await seat.left.wait()
        except Exception as error:  # task boundary: whoever attaches gets it
            if seat.opened.done():
                raise
            seat.opened.set_exception(error)

    async def _free(self, name: str) -> None:
        if (seat := self._seats.pop(name, None)) is not None:
            seat.left.set()
            if seat.task is not None:
                await asyncio.gather(seat.task, return_exceptions=True)
            log.info("adapter %s left its seat", name)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for name, seat in tuple(self._seats.items()):
                if seat.until < self._clock():
                    log.warning("nobody renewed the lease of adapter %s", name)
                    await self.detach(name)
