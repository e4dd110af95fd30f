"""The queue against a real server: effects once, whatever order workers crash in."""

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import from_url
from redis.exceptions import ResponseError

from reflux_trainer.queue.groups import DeadPrompt, GroupQueue
from reflux_trainer.queue.ledger import Cursor, Ledger, audit
from reflux_trainer.queue.prompts import MAX_ATTEMPTS, MAX_TAKES, PromptQueue
from reflux_trainer.queue.records import Generation, Grade, Group, Prompt, Sample, Span
from reflux_trainer.queue.scripts import Fenced

SAMPLE = Sample([1, 2], [-0.5, -0.25], "stop", [Span(3, 0, 2)], "replica-0")


def prompt(index, version=0):
    return Prompt(index, [1, 2, 3], {"phases": ["x"]}, version, time.time())


def group(claim, worker="w"):
    return Group(
        index=claim.prompt.index,
        version=claim.prompt.version,
        token_ids=claim.prompt.token_ids,
        samples=[SAMPLE, SAMPLE],
        grades=[Grade("scored", 1.0, {"hits": 1.0}), Grade("invalid", 0.0)],
        issued_at=claim.prompt.issued_at,
        claimed_at=1.0,
        generate_seconds=0.1,
        verify_seconds=0.2,
        emitted_at=2.0,
        worker=worker,
    )


async def opened(redis_client, run_id, attempt=1):
    ledger = Ledger(redis_client, run_id, attempt)
    await ledger.begin(Cursor())
    queue = PromptQueue(redis_client, run_id, "w0")
    await queue.open()
    return ledger, GroupQueue(redis_client, run_id, attempt), queue


async def test_a_prompt_is_issued_once_however_often_it_is_sent(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    assert await groups.issue([prompt(0), prompt(1)]) == 2
    assert await groups.issue([prompt(0), prompt(1), prompt(2)]) == 1
    claims = await queue.claim(10, 10)
    assert [claim.prompt.index for claim in claims] == [0, 1, 2]
    assert claims[0].prompt == prompt(0) or claims[0].prompt.token_ids == [1, 2, 3]
    assert await queue.claim(10, 1) == []


async def test_a_group_is_emitted_once_and_read_back_whole(redis_client, run_id):
    ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0)])
    (claim,) = await queue.claim(1, 10)
    assert await queue.emit(claim, group(claim)) == "emitted"
    assert await queue.emit(claim, group(claim)) == "duplicate"
    (arrival,) = await groups.read(10)
    assert arrival.samples == [SAMPLE, SAMPLE]
    assert arrival.grades[0].figures == {"hits": 1.0}
    assert await groups.read(1) == []
    assert await ledger.states() == {0: "emitted"}


async def test_a_worker_that_lost_its_claim_can_neither_store_nor_emit(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    other = PromptQueue(redis_client, run_id, "w1")
    await groups.issue([prompt(0)])
    (old,) = await queue.claim(1, 10)
    assert await queue.store(old, Generation([SAMPLE], 1.0, 2.0))
    (new,) = await other.claim_abandoned(10, 0)
    assert new.token > old.token
    assert new.stored == Generation([SAMPLE], 1.0, 2.0), "samples of the dead worker are reused"
    assert await queue.heartbeat([old]) == {0}
    assert not await queue.store(old, Generation([], 1.0, 2.0))
    assert await queue.emit(old, group(old)) == "stale"
    assert await queue.fail(old, "late", counted=True) == "stale"
    assert await other.emit(new, group(new)) == "emitted"


async def test_a_heartbeat_keeps_a_claim_from_being_taken_over(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0)])
    (claim,) = await queue.claim(1, 10)
    await asyncio.sleep(0.06)
    assert await queue.heartbeat([claim]) == set()
    assert await PromptQueue(redis_client, run_id, "w1").claim_abandoned(10, 50) == []
    assert await groups.worker_beats() == {"w0": 1}
    await groups.forget_workers(["w0"])
    assert await groups.worker_beats() == {}


async def test_a_poison_prompt_becomes_a_dead_letter_and_the_trainer_hears_of_it(redis_client, run_id):
    ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0)])
    for attempt in range(MAX_ATTEMPTS):
        (claim,) = await queue.claim(1, 10)
        last = attempt == MAX_ATTEMPTS - 1
        assert await queue.fail(claim, "too long", counted=True) == ("dead" if last else "retry")
    (arrival,) = await groups.read(10)
    assert isinstance(arrival, DeadPrompt)
    assert await ledger.dead_letters() == [(0, "too long")]
    assert await queue.claim(1, 1) == []


async def test_a_failure_of_the_surroundings_does_not_count_against_the_prompt(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0)])
    for _ in range(3 * MAX_TAKES):  # a long outage
        (claim,) = await queue.claim(1, 10)
        assert await queue.fail(claim, "the gateway is away", counted=False) == "retry"
    (claim,) = await queue.claim(1, 10)
    assert claim.takes == 1


async def test_a_prompt_that_takes_its_workers_down_ends_in_the_dead_letters(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0)])
    (claim,) = await queue.claim(1, 10)
    for _ in range(MAX_TAKES - 1):  # each worker dies with its claim
        (claim,) = await queue.claim_abandoned(1, 0)
    assert claim.takes == MAX_TAKES
    assert await queue.fail(claim, "claimed too often", counted=True) == "dead"


async def test_what_a_prompt_leaves_in_the_bookkeeping_goes_with_it(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0)])
    (claim,) = await queue.claim(1, 10)
    assert await queue.fail(claim, "once", counted=True) == "retry"
    (claim,) = await queue.claim(1, 10)
    assert await queue.emit(claim, group(claim)) == "emitted"
    for key in (queue._keys.attempts, queue._keys.takes, queue._keys.claims, queue._keys.samples):
        assert not await redis_client.exists(key)


async def test_a_step_is_logged_once_and_consumes_its_prompts(redis_client, run_id):
    ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0), prompt(1)])
    for claim in await queue.claim(2, 10):
        await queue.emit(claim, group(claim))
    arrivals = await groups.read(10)
    before = await ledger.cursor()
    after = Cursor(step=1, low_water_index=2, next_prompt_index=2, op_id=before.op_id)
    logged = await ledger.log_step(after, [b"Fdata", b"Ostep"], arrivals)
    assert logged.op_id == 2
    assert (await ledger.log_step(after, [b"Fdata", b"Ostep"], arrivals)).op_id == 2
    assert await ledger.operations(0, 2) == [(1, b"Fdata"), (2, b"Ostep")]
    assert await ledger.states() == {0: "trained@1", 1: "trained@1"}
    assert (await ledger.audit(2)).violations == []
    with pytest.raises(ResponseError, match="PROMPT 0 is trained@1"):
        await ledger.log_step(logged, [b"F", b"O"], arrivals)
    with pytest.raises(ResponseError, match="GAP after operation 2"):
        await ledger.log_step(Cursor(step=2, op_id=5), [b"F", b"O"], [])
    await ledger.trim(1)
    with pytest.raises(LookupError, match="operations 1 to 1"):
        await ledger.operations(0, 2)


async def test_an_older_attempt_of_the_trainer_is_fenced(redis_client, run_id):
    ledger, groups, _queue = await opened(redis_client, run_id)
    cursor = await Ledger(redis_client, run_id, 2).begin(Cursor(step=99))
    assert cursor.step == 0, "a known cursor is kept"
    for call in (groups.issue([prompt(0)]), ledger.log_step(Cursor(), [b"F"], []), ledger.begin(Cursor())):
        with pytest.raises(Fenced):
            await call


async def test_a_new_attempt_reads_the_unconsumed_groups_again(redis_client, run_id):
    _ledger, groups, queue = await opened(redis_client, run_id)
    await groups.issue([prompt(0), prompt(1)])
    for claim in await queue.claim(2, 10):
        await queue.emit(claim, group(claim))
    arrivals = await groups.read(10)
    await groups.close([(arrivals[0], "filtered")])
    ledger = Ledger(redis_client, run_id, 2)
    await ledger.begin(Cursor())
    again = await GroupQueue(redis_client, run_id, 2).read(10)
    assert [arrival.index for arrival in again] == [1]
    assert await ledger.states() == {0: "filtered", 1: "emitted"}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "steal", "store", "emit", "fail", "crash", "late"]),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    max_size=80,
)


@given(steps=STEPS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_workers_that_crash_anywhere_emit_each_prompt_exactly_once(valkey_url, steps):
    asyncio.run(play(valkey_url, steps))


async def play(valkey_url, steps):
    async with from_url(valkey_url) as client:
        run = f"play-{time.monotonic_ns()}"
        ledger, groups, _ = await opened(client, run)
        await groups.issue([prompt(index) for index in range(5)])
        workers = [PromptQueue(client, run, f"w{each}") for each in range(3)]
        held = {0: [], 1: [], 2: []}
        ghosts = []  # claims of crashed workers, whose calls may still arrive
        emitted = []
        for action, who, which in steps:
            await act(action, workers[who], held[who], ghosts, which, emitted)
        for worker in workers:  # everybody comes back and finishes what is left
            for claim in [*await worker.claim(9, 1), *await worker.claim_abandoned(9, 0)]:
                if await worker.emit(claim, group(claim)) == "emitted":
                    emitted.append(claim.prompt.index)
        arrivals = await groups.read(10)
        dead = [arrival.index for arrival in arrivals if isinstance(arrival, DeadPrompt)]
        assert sorted(emitted + dead) == [0, 1, 2, 3, 4]
        assert sorted(arrival.index for arrival in arrivals) == [0, 1, 2, 3, 4]
        assert await groups.depths() == (0, 5)
        assert set((await ledger.states()).values()) <= {"emitted", "dead"}


async def act(action, worker, held, ghosts, which, emitted):
    claim = held[which % len(held)] if held else None
    if action == "claim":
        held += await worker.claim(1, 1)
    elif action == "steal":
        held += await worker.claim_abandoned(1, 0)
    elif action == "crash":
        ghosts += held
        held.clear()
    elif action == "late" and ghosts:
        ghost = ghosts[which % len(ghosts)]
        if await worker.emit(ghost, group(ghost)) == "emitted":
            emitted.append(ghost.prompt.index)
    elif claim and action == "store":
        await worker.store(claim, Generation([SAMPLE], 1.0, 2.0))
    elif claim and action == "emit":
        if await worker.emit(claim, group(claim)) == "emitted":
            emitted.append(claim.prompt.index)
    elif claim and action == "fail":
        await worker.fail(claim, "no", counted=which % 2 == 0)
        held.remove(claim)


def test_the_audit_names_what_is_wrong():
    states = {0: "trained@1", 2: "emitted", 3: "trained@3"}
    found = audit(states, Cursor(step=2, next_prompt_index=4, low_water_index=3), 1).violations
    assert found == [
        "prompt 1 was never issued, later ones were",
        "prompt 2 is emitted, but the loop is past it",
        "step 2 trained 0 prompts instead of 1",
        "a prompt is marked for step 3, which is not done",
    ]
