"""Seats of adapters: bounded, leased, and independent of the call that asked for them."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from reflux_inference_gateway.engine.seats import Seats
from reflux_kit import deadline
from reflux_kit.errors import CapacityExhausted, InvalidRequest, WrongState
from reflux_model.lora import LoraSpec

SPEC = LoraSpec(rank=4, groups=("attention",))


class Served:
    """What is opened at the moment; `broken` ones have been refused by the broker since."""

    def __init__(self):
        self.open, self.broken, self.budgets, self.refuse = [], set(), [], False

    @asynccontextmanager
    async def __call__(self, name, spec):
        if self.refuse:
            raise InvalidRequest("the model has no such target")
        self.open.append(name)
        self.budgets.append(deadline.budget(30.0))
        try:
            yield lambda: name not in self.broken
        finally:
            self.open.remove(name)


async def test_a_seat_has_not_the_deadline_of_the_call_that_asks_for_it():
    served = Served()
    seats = Seats(2, 8, served)
    async with seats.running():
        deadline.enter(0.5)
        await seats.attach("a/adapters/run", SPEC, 60.0)
        assert deadline.budget(30.0) <= 0.5
        assert served.budgets == [30.0]
    assert served.open == []


async def test_seats_are_bounded_and_free_when_they_are_left_or_their_lease_ends():
    served, now = Served(), [0.0]
    seats = Seats(2, 8, served, clock=lambda: now[0])
    async with seats.running():
        for name in ("a", "b", "a"):
            await seats.attach(name, SPEC, 60.0)
        assert served.open == ["a", "b"], "attaching again renews"
        with pytest.raises(CapacityExhausted, match="all 2 seats for adapters are taken, by a, b"):
            await seats.attach("c", SPEC, 60.0)
        with pytest.raises(WrongState, match="is attached with"):
            await seats.attach("a", LoraSpec(rank=2, groups=("attention",)), 60.0)
        with pytest.raises(InvalidRequest, match="rank 9 exceeds the 8"):
            await seats.attach("d", LoraSpec(rank=9, groups=("attention",)), 60.0)
        await seats.detach("b")
        await seats.detach("b")
        served.refuse = True
        with pytest.raises(InvalidRequest, match="no such target"):
            await seats.attach("c", SPEC, 60.0)
        assert seats.taken == ("a",)
        served.refuse = False
        await seats.attach("c", SPEC, 600.0)
        now[0] = 61.0
        async with asyncio.timeout(10):
            while "a" in served.open:
                await asyncio.sleep(0.02)
        assert seats.taken == ("c",)
    assert served.open == []


async def test_an_adapter_that_the_broker_refused_is_opened_anew():
    served = Served()
    seats = Seats(1, 8, served)
    async with seats.running():
        await seats.attach("a", SPEC, 60.0)
        served.broken.add("a")
        await seats.attach("a", SPEC, 60.0)
        assert (served.open, len(served.budgets)) == (["a"], 2)
    with pytest.raises(WrongState, match="REFLUX_ENGINE_MAX_ADAPTERS"):
        await Seats(0, 8, served).attach("a", SPEC, 60.0)


async def test_a_call_that_is_cancelled_while_its_seat_opens_leaves_nobody_there():
    served, gate = Served(), asyncio.Event()

    @asynccontextmanager
    async def slowly(name, spec):
        await gate.wait()
        async with served(name, spec) as works:
            yield works

    seats = Seats(1, 8, slowly)
    async with seats.running():
        attaching = asyncio.create_task(seats.attach("a", SPEC, 60.0))
        await asyncio.sleep(0.01)
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
        gate.set()
        await seats.attach("b", SPEC, 60.0)
        assert (served.open, seats.taken) == (["b"], ("b",))
