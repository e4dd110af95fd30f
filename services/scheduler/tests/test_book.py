"""The scheduler's only writer: what Redis has, it knows, even if callers leave and answers are lost."""

import asyncio
import threading
import uuid
from dataclasses import replace

import grpc
import pytest
import redis
from fake_cluster import SPEC, FakeCluster, candidate, until
from redis.asyncio import Redis
from redis_gate import RedisGate
from scheduler_in_memory import InMemory, a_book
from scheduler_stack import HANG_SECONDS

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.redis import open_redis
from reflux_placement.topology import Node, Resources, build_topology
from reflux_scheduler import jobs, shapes
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.job import Job, MemberStatus
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.store import LEADER, Store

LEASE = "1 a:1 a"
TOPOLOGY = build_topology("c", [Node("n1", Resources(4, 4000, 1 << 30), {"rack": "r"})])


class HeldStore(Store):
    """Carries a write out, and then answers when it is let go, or breaks the connection."""

    def __init__(self, connection: Redis) -> None:
        super().__init__(connection)
        self.lease = LEASE
        self.written = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self.breaks = False

    async def _write(self, *words, **options) -> str:
        done = await super()._write(*words, **options)
        self.written.set()
        await self.answers.wait()
        if self.breaks:
            raise redis.ConnectionError("the answer was lost")
        return done


@pytest.fixture
async def store(keys) -> HeldStore:
    await keys.set(LEADER, LEASE)
    return HeldStore(keys)


def make(job_id: str):
    return lambda number: Job(job_id, number, SPEC, 1.0)


def cancel(job: Job) -> Job:
    return jobs.end(job, "CANCELLED", "enough", 2.0)


async def leave(store: HeldStore, call) -> None:
    """The caller gives up once Redis has the write; then Redis answers."""
    store.answers.clear()
    store.written.clear()
    task = asyncio.create_task(call)
    await asyncio.wait_for(store.written.wait(), HANG_SECONDS)
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    store.answers.set()


async def test_a_job_whose_creator_gives_up_is_known_and_its_number_is_its_own(store):
    book = a_book(store, Ledger(TOPOLOGY))
    await leave(store, book.create("one", make("first")))
    again = await book.create("one", make("again"))
    other = await book.create("two", make("second"))
    assert (again.id, again.number, other.number) == ("first", 1, 2)
    assert [job.id for job in (await store.load())[0]] == list(book.jobs) == ["first", "second"]


async def test_a_change_whose_caller_gives_up_is_made(store):
    book = a_book(store, Ledger(TOPOLOGY))
    await book.create("one", make("first"))
    await leave(store, book.change("first", cancel))
    await until(lambda: book.get("first").final)
    assert (await store.find("first")) == book.get("first")


async def test_a_job_whose_creation_nobody_heard_of_is_found_by_the_request_that_made_it(store):
    book = a_book(store, Ledger(TOPOLOGY))
    store.breaks = True
    with pytest.raises(redis.ConnectionError):
        await book.create("one", make("first"))
    store.breaks = False
    assert list(book.jobs) == []
    assert (await book.create("two", make("second"))).number == 2
    assert (await book.create("one", make("again"))).number == 1
    assert sorted(book.jobs) == ["first", "second"]


async def test_a_job_whose_creation_nobody_heard_of_is_found_without_being_asked_for(store):
    book = a_book(store, Ledger(TOPOLOGY))
    store.breaks = True
    with pytest.raises(redis.ConnectionError):
        await book.create("one", make("first"))
    store.breaks = False
    await book.settle()
    assert list(book.jobs) == ["first"]


async def test_a_change_whose_outcome_nobody_heard_is_undone_in_the_store_with_its_members(store):
    book = a_book(store, Ledger(TOPOLOGY))
    before = await book.create("one", make("first"))
    status = MemberStatus("learner", 0, "n1")

    def change(job: Job) -> Job:
        return replace(cancel(job), members={status.label: status})

    store.breaks = True
    with pytest.raises(redis.ConnectionError):
        await book.change("first", change)
    store.breaks = False
    assert (book.get("first"), (await store.find("first")).state) == (before, "CANCELLED")
    await book.settle()
    assert await store.find("first") == before


async def test_what_is_under_way_when_a_reign_ends_is_ended_and_its_caller_sent_to_the_next_leader(store):
    book = a_book(store, Ledger(TOPOLOGY))
    store.answers.clear()
    call = asyncio.create_task(book.create("one", make("first")))
    await asyncio.wait_for(store.written.wait(), HANG_SECONDS)
    await book.close()
    with pytest.raises(NotLeading):
        await call


async def test_finished_jobs_that_were_watched_leave_nothing(store):
    book = a_book(store, Ledger(TOPOLOGY))
    for number in range(3):
        job = await book.create(f"r{number}", make(f"j{number}"))
        watching = book.watch(job.id, -1)
        assert (await anext(watching)).state == "PENDING"
        following = asyncio.create_task(anext(watching))
        await asyncio.sleep(0)
        await book.change(job.id, cancel)
        assert (await following).final
        async for _ in book.watch(job.id, -1):
            pass
    assert book._pulses == {}


async def test_a_node_is_drained_even_if_the_operator_gives_up(url):
    async with RedisGate(url) as gate, open_redis(gate.url) as keys:
        leader = await candidate(keys, FakeCluster("n1"), 600)
        async with leader.standing("a:1", "a"):
            controller = await leader.leading()
            gate.arm(rb"scheduler}:drains", "after")
            draining = asyncio.create_task(controller.drain("n1", "new fan"))
            await asyncio.wait_for(gate.hit.wait(), HANG_SECONDS)
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            await gate.release()  # The client asks again.
            await until(lambda: controller.nodes.drains == {"n1": "new fan"})


async def test_a_job_whose_client_has_no_more_time_is_listed_and_can_be_cancelled(own_stack, client):
    async with RedisGate(own_stack.environment["REFLUX_REDIS_URL"]) as gate:
        own_stack.start_scheduler(REFLUX_REDIS_URL=gate.url)
        await client.ready()
        request = pb.CreateJobRequest(request_id=str(uuid.uuid4()), display_name="test", roles=[client.role("x")])
        gate.arm(rb'"display_name":"test"', "after")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.CreateJob(request, timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(gate.hit.wait(), HANG_SECONDS)
        await gate.release()  # The scheduler's client repeats what it has sent.
        again = await client.create(*request.roles, request_id=request.request_id)
        listed = (await client.stub.ListJobs(pb.ListJobsRequest(), timeout=HANG_SECONDS)).jobs
        assert [job.name for job in listed] == [again.name]
        await client.cancel(again.name)
        await client.until_state(again.name, "CANCELLED")
        own_stack.kill("scheduler")  # Without the gate it would look for its Redis for a second.


async def test_jobs_are_taken_over_beside_the_renewal_of_the_lease(store, monkeypatch):
    for number in range(1, 41):
        await store.create(make(f"j{number}")(number), f"r{number}")
    threads = []
    real = shapes.fits_ever
    monkeypatch.setattr(shapes, "fits_ever", lambda *words: threads.append(threading.get_ident()) or real(*words))
    controller = InMemory(TOPOLOGY, FakeCluster("n1"), store).controller
    loading = asyncio.create_task(controller.load())
    turns = 0
    while not loading.done():
        await asyncio.sleep(0)
        turns += bool(controller.book.jobs)
    assert len(controller.book.jobs) == 40
    assert turns >= 2 * 40, "another task had its turn after each job"
    assert len(threads) == 1, "all are of one shape"
    assert threads[0] != threading.get_ident()
