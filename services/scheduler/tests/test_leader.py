"""Two schedulers: one leads, the other takes over; what a leader of the past says or writes changes nothing."""

import asyncio
import contextlib
import signal
import time

import grpc
import pytest
import redis
from fake_cluster import until
from redis.asyncio import Redis
from scheduler_stack import HANG_SECONDS, Client, alive, free_port

from reflux.scheduler.v1 import agent_service_pb2 as agent_pb
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.channel import open_channel
from reflux_kit.errors import WrongState, metadata_of
from reflux_placement.topology import Resources
from reflux_scheduler.agent.lease import TermGuard
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.servicer import AgentServicer
from reflux_scheduler.agent.supervisor import Household
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.job import Job
from reflux_scheduler.leadership import Leadership
from reflux_scheduler.spec import JobSpec, RoleTemplate
from reflux_scheduler.store import Store

LEADER_SECONDS = 1.0


def queued(number: int = 1) -> Job:
    spec = JobSpec("test", (RoleTemplate("learner", 1, Resources(), ("x",)),))
    return Job(f"j{number}", number, spec, created_at=0.0)


class Reigns:
    """Notes leases and waits until it is cancelled."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, lease: str) -> None:
        self.leases.put_nowait(lease)
        await asyncio.get_running_loop().create_future()

    async def next(self) -> str:
        return await asyncio.wait_for(self.leases.get(), HANG_SECONDS)


async def test_a_lease_is_held_by_one_and_its_successor_has_a_higher_term(keys):
    first, second = Leadership(keys, "a:1", "a", 0.3), Leadership(keys, "b:1", "b", 0.3)
    reign, later = Reigns(), Reigns()
    async with first.campaigning(reign):
        lease = await reign.next()
        async with second.campaigning(later):
            with pytest.raises(NotLeading, match="the leader is at a:1"):
                await second.leading()
            assert later.leases.empty()
            # Somebody else has taken it and does not renew: both stand again when that lease has run out.
            await keys.set("{scheduler}:term", int(lease.split()[0]) + 1)
            await keys.set("{scheduler}:leader", "1 c:1 c", px=50)
            tasks = [asyncio.create_task(each.next()) for each in (reign, later)]
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (successor,) = [task.result() for task in done]
            assert int(successor.split()[0]) > int(lease.split()[0])
            for task in others:
                task.cancel()


class Cut:
    """A connection to Redis that a test can cut."""

    def __init__(self, keys: Redis) -> None:
        self._keys = keys
        self.is_cut = False

    async def eval(self, *words):
        if self.is_cut:
            raise redis.ConnectionError("cut")
        return await self._keys.eval(*words)


async def until_ended(leader: Leadership) -> float:
    """When a leader stopped to believe that it leads."""
    await until(lambda: not leader.holds)
    return time.monotonic()


async def test_a_leader_without_redis_goes_on_for_a_while_and_then_no_more(keys):
    cut, reign = Cut(keys), Reigns()
    leader = Leadership(cut, "a:1", "a", 0.3, alone_seconds=0.5)
    async with leader.campaigning(reign):
        await reign.next()
        cut.is_cut = True
        lease_over = leader._expires
        assert await until_ended(leader) >= lease_over + 0.5
        cut.is_cut = False
        await until(lambda: leader.holds)
        assert reign.leases.empty(), "nobody else has led: the reign goes on"


async def test_a_leader_without_redis_that_knows_of_another_one_stops_at_the_end_of_its_lease(keys):
    cut, reign = Cut(keys), Reigns()
    leader, other = Leadership(cut, "a:1", "a", 0.3, alone_seconds=600), Leadership(keys, "b:1", "b", 0.3)
    async with leader.campaigning(reign), contextlib.AsyncExitStack() as stack:
        await reign.next()
        later = Reigns()
        await stack.enter_async_context(other.campaigning(later))
        await until(lambda: leader._rival)
        cut.is_cut = True
        await until_ended(leader)
        await later.next()
        assert other.successor, "what was answered for the first one may still be in force"


async def test_a_scheduler_that_comes_back_at_its_own_address_succeeds_nobody(keys):
    for _ in range(2):
        reign, leader = Reigns(), Leadership(keys, "a:1", "a", 0.3)
        async with leader.campaigning(reign):
            await reign.next()
            assert not leader.successor


async def test_what_a_leader_of_the_past_writes_changes_nothing(keys):
    old, new = Store(keys), Store(keys)
    old.lease, new.lease = "1 a:1 a", "2 b:1 b"
    await keys.set("{scheduler}:leader", new.lease)
    await new.create(queued(1), "one")
    with pytest.raises(NotLeading):
        await old.create(queued(2), "two")
    with pytest.raises(NotLeading):
        await old.forget("j1")
    jobs, unreadable = await new.load()
    assert ([job.id for job in jobs], unreadable) == (["j1"], [])
    assert await new.create(queued(3), "two") == "j3"
    assert await new.create(queued(4), "two") == "j3"


async def test_a_lease_that_ran_out_is_still_good_while_nobody_else_has_led(keys):
    store = Store(keys)
    store.lease = "7 a:1 a"
    await keys.set("{scheduler}:term", "7")
    await store.create(queued(1), "one")
    assert await keys.get("{scheduler}:leader") == b"7 a:1 a"
    await keys.delete("{scheduler}:leader")
    await keys.set("{scheduler}:term", "8")
    with pytest.raises(NotLeading):
        await store.create(queued(2), "two")


async def test_a_job_that_cannot_be_read_is_named_and_the_others_are_taken_over(keys):
    store = Store(keys)
    store.lease = "7 a:1 a"
    await keys.set("{scheduler}:leader", store.lease)
    for number in (1, 2):
        await store.create(queued(number), f"request-{number}")
    await keys.set("{scheduler}:job:j1", '{"id": "j1", "placement": "of another version"}')
    jobs, unreadable = await store.load()
    assert ([job.id for job in jobs], unreadable) == (["j2"], ["j1"])


async def test_an_agent_refuses_calls_of_an_earlier_term(tmp_path):
    terms = TermGuard()
    assert terms.admit(5)
    servicer = AgentServicer(MemberTable(Household("n1", {}, tmp_path, log_limit_bytes=1 << 16)), "n1", terms)
    with pytest.raises(WrongState, match="term 4 is over"):
        await servicer.StopRole(agent_pb.StopRoleRequest(role_id="j/learner/0", term=4), None)
    order = agent_pb.StartRoleRequest(role_id="j/learner/0", job="jobs/j", term=4)
    order.spec.role, order.spec.count = "learner", 1
    order.spec.argv.append("true")
    with pytest.raises(WrongState, match="a scheduler with term 5 leads"):
        await servicer.StartRole(order, None)


async def test_a_follower_names_the_leader_and_takes_over_its_jobs_when_it_is_killed(own_stack, client):
    second = f"127.0.0.1:{free_port()}"
    both = f"{own_stack.address},{second}"
    lead = {"REFLUX_SCHEDULER_LEADER_SECONDS": str(LEADER_SECONDS)}
    own_stack.start_scheduler(**lead)
    await client.ready()
    own_stack.start("second", "reflux_scheduler.main", REFLUX_SCHEDULER_LISTEN=second, **lead)
    own_stack.start_agent("n1", REFLUX_SCHEDULER_ADDRESS=both)
    job = await client.create(client.role("engine", count=2, max_restarts=1))
    job = await client.until_state(job.name, "RUNNING")
    pids = [member.pid for member in job.members]
    async with open_channel(second) as channel:
        follower = Client(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await follower.stub.GetJob(pb.GetJobRequest(name=job.name), wait_for_ready=True, timeout=HANG_SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert metadata_of(caught.value) == {"leader": own_stack.address}
        own_stack.kill("scheduler", signal.SIGKILL)
        after = await until_leads(follower, job.name)
        assert [member.pid for member in after.members] == pids
        probe = await follower.create(follower.role("probe"))
        await follower.until_state(probe.name, "RUNNING")
        assert (await follower.get(job.name)).state == job_pb2.Job.STATE_RUNNING
        assert all(alive(pid) for pid in pids)
        own_stack.start_scheduler(**lead)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.GetJob(pb.GetJobRequest(name=job.name), wait_for_ready=True, timeout=HANG_SECONDS)
        assert metadata_of(caught.value) == {"leader": second}
        await follower.cancel(job.name)
        await follower.until_state(job.name, "CANCELLED")
    await own_stack.gone(*pids)


async def until_leads(client: Client, name: str) -> job_pb2.Job:
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            try:
                return (await client.stub.GetJob(pb.GetJobRequest(name=name), timeout=HANG_SECONDS)).job
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
