"""Seven faults at five points of a sync: whatever happens, replicas serve sealed versions, and the next one arrives.

The victim is one of four replicas: it stops at the point, and the fault comes while it stands there.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fault_processes import PHASES, Hook, Phase
from fault_world import NAMES, VICTIM, World, resume, stop

_SHORT_SECONDS = 1.0
_REDIS_SECONDS = 5.0
Fault = Callable[[World], Awaitable[None]]


async def publisher_dies(world: World) -> None:
    world.publisher.kill()
    world.replicas[VICTIM].go_on()
    world.publisher = world.stack.publisher("shm")


async def one_of_four_dies(world: World) -> None:
    world.replicas[VICTIM].peer.kill()
    await world.publisher.hears()  # with or without the version: the publisher is told in time
    world.start(VICTIM)


async def broker_dies(world: World) -> None:
    world.restart_broker()
    world.replicas[VICTIM].go_on()
    await world.publisher.hears()


async def replica_hangs(world: World) -> None:
    stop(world.replicas[VICTIM])
    await world.publisher.hears()  # after the version's timeout of a second
    resume(world.replicas[VICTIM])
    world.replicas[VICTIM].go_on()


async def redis_is_away(world: World) -> None:
    world.replicas[VICTIM].go_on()
    await world.redis_away(_REDIS_SECONDS)
    await world.publisher.hears()


async def second_publisher(world: World) -> None:
    stale, world.publisher = world.publisher, world.stack.publisher("shm")
    world.orders(world.publisher, 2, seed=22)
    world.replicas[VICTIM].go_on()
    taken = await world.publisher.hears()
    assert "error" not in taken, taken
    await stale.hears()
    fenced = await world.publishes(stale, 9, seed=9)
    assert fenced["error"].startswith("PublisherFenced"), fenced
    del world.sealed[9]


async def flipped_bit(world: World) -> None:
    """The hook has flipped it already."""
    answer = await world.publisher.hears()
    if "error" in answer:
        assert "checksum mismatch" in answer["error"], answer


FAULTS: tuple[Fault, ...] = (
    publisher_dies, one_of_four_dies, broker_dies, replica_hangs, redis_is_away, second_publisher, flipped_bit,
)  # fmt: skip
SHORT: dict[Fault, Phase] = {
    publisher_dies: "mid-read",
    one_of_four_dies: "before-ack",
    broker_dies: "between-commits",
    replica_hangs: "prepare",
    redis_is_away: "before-ack",
    second_publisher: "mid-read",
    flipped_bit: "mid-read",
}
_CELLS = [
    pytest.param(fault, phase, marks=() if SHORT[fault] == phase else pytest.mark.slow)
    for fault in FAULTS
    for phase in PHASES
]


@pytest.mark.parametrize(("fault", "phase"), _CELLS)
async def test_after_a_fault_nothing_is_mixed_and_the_next_version_arrives(
    tmp_path: Path, fault: Fault, phase: Phase
) -> None:
    async with World(tmp_path) as world:
        await reach(world, phase, flip=fault is flipped_bit, timeout=_SHORT_SECONDS if fault is replica_hangs else 20.0)
        await fault(world)
        await world.serve_anew(world.publisher, 3, seed=3)
        world.check()


async def reach(world: World, phase: Phase, *, flip: bool, timeout: float) -> None:
    """Version 1 is served, version 2 is under way, and the victim stands at the point."""
    late = phase == "register"
    hook = Hook(phase, 1 if late else 2, flip)
    others = NAMES[:-1]
    for name in others:
        world.start(name)
    if not late:
        world.start(VICTIM, hook)
    first = await world.publishes(world.publisher, 1, seed=1, min_replicas=len(world.replicas))
    assert "error" not in first, first
    for replica in world.replicas.values():
        await replica.until(lambda state: state.get("version") == 1)
    if late:
        world.start(VICTIM, hook)
        await world.replicas[VICTIM].until(lambda state: state.get("at") == phase)
    if late and flip:
        await world.replicas[VICTIM].until(lambda state: state.get("version") == 1)  # after another attempt
    world.orders(world.publisher, 2, seed=2, timeout=timeout, min_replicas=len(others))
    await world.replicas[VICTIM].until(lambda state: state.get("at") == phase)
    if phase == "between-commits" and not flip:
        for name in others:
            await world.replicas[name].until(lambda state: state.get("version") == 2)
