import asyncio

import pytest

from reflux_sandbox.coalesce import Coalescer


class Commits:
    """Keeps what came together; each commit waits until it is let go."""

    def __init__(self):
        self.batches = []
        self.gate = asyncio.Event()
        self.error = None

    async def __call__(self, arguments):
        self.batches.append(arguments)
        await self.gate.wait()
        if self.error:
            raise self.error
        return [argument * 10 for argument in arguments]


async def test_a_lone_call_goes_at_once_and_those_behind_it_go_together():
    commits = Commits()
    call = Coalescer(commits, most=3)
    first = asyncio.create_task(call(1))
    while not commits.batches:
        await asyncio.sleep(0)
    others = [asyncio.create_task(call(number)) for number in range(2, 7)]
    await asyncio.sleep(0)
    commits.gate.set()
    assert await asyncio.gather(first, *others) == [10, 20, 30, 40, 50, 60]
    assert commits.batches == [[1], [2, 3, 4], [5, 6]]


async def test_an_error_reaches_every_caller_and_the_next_call_works():
    commits = Commits()
    commits.error = ConnectionError("away")
    commits.gate.set()
    call = Coalescer(commits)
    results = await asyncio.gather(call(1), call(2), return_exceptions=True)
    assert results == [commits.error] * 2
    commits.error = None
    assert await call(3) == 30


async def test_a_caller_that_gives_up_does_not_stop_the_others():
    commits = Commits()
    call = Coalescer(commits)
    quitter, patient = asyncio.create_task(call(1)), asyncio.create_task(call(2))
    while not commits.batches:
        await asyncio.sleep(0)
    quitter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quitter
    commits.gate.set()
    assert await patient == 20
