"""The agent's lease: it ends on time whatever the scheduler does, and with it the members."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_cluster import until
from scheduler_stack import HANG_SECONDS, alive

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_scheduler.agent.lease import Lease, TermGuard
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.orders import RoleOrder
from reflux_scheduler.agent.supervisor import Household

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); open('deaf', 'w').close(); time.sleep(600)"


@dataclass
class Schedulers:
    """Schedulers at several addresses, each with the term that it believes in; those that `hang` do not answer."""

    terms: list[int]
    lease_seconds: float = 0.3
    margin_seconds: float = 0.5
    hang: bool = False
    at: int = 0
    turns: int = 0
    heard: list[int] = field(default_factory=list)

    @property
    def stub(self) -> "Schedulers":
        return self

    @property
    def address(self) -> str:
        return f"scheduler-{self.at}:1"

    def turn(self, leader: str = "") -> bool:
        self.turns += 1
        self.at = (self.at + 1) % len(self.terms)
        return len(self.terms) > 1

    async def RegisterAgent(self, request: pb.RegisterAgentRequest, timeout: float) -> pb.RegisterAgentResponse:
        self.heard.append(self.at)
        times = {"lease_seconds": self.lease_seconds, "margin_seconds": self.margin_seconds, "heartbeat_seconds": 0.05}
        return pb.RegisterAgentResponse(term=self.terms[self.at], **times)

    async def AgentHeartbeat(self, request: pb.AgentHeartbeatRequest, timeout: float) -> pb.AgentHeartbeatResponse:
        if self.hang:
            await asyncio.Event().wait()
        self.heard.append(self.at)
        return pb.AgentHeartbeatResponse(term=self.terms[self.at])


@pytest.fixture
async def members(tmp_path) -> AsyncIterator[MemberTable]:
    table = MemberTable(Household("n1", dict(os.environ), tmp_path, log_limit_bytes=1 << 16))
    yield table
    await table.stop_all("the test is over", 0.0)


@contextlib.asynccontextmanager
async def kept(schedulers: Any, members: MemberTable, guard: TermGuard) -> AsyncIterator[Lease]:
    lease = Lease(schedulers, members, "n1", 60.0, "", guard)
    task = asyncio.create_task(lease.keep("a:1"))
    try:
        yield lease
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def start(members: MemberTable, script: str, **fields) -> int:
    order = RoleOrder("j/role/0", "jobs/j", "role", 0, 1, ("python", "-c", script), **fields)
    return (await members.start(order)).pid


async def test_the_answers_of_a_scheduler_that_leads_no_more_renew_nothing_and_the_lease_ends(members):
    guard, schedulers = TermGuard(), Schedulers([5])
    pid = await start(members, "import time; time.sleep(600)")
    async with kept(schedulers, members, guard):
        await until(lambda: len(schedulers.heard) > 3)
        assert alive(pid)
        schedulers.terms = [4]  # The leader with term 5 has gone; this one does not know that it ever led.
        await until(lambda: "lease ended" in members.reports()[0].message)
        assert not alive(pid)


async def test_an_agent_turns_away_from_a_scheduler_that_leads_no_more(members):
    guard, schedulers = TermGuard(), Schedulers([4, 5])
    guard.admit(5)
    async with kept(schedulers, members, guard):
        await until(lambda: schedulers.heard[-3:] == [1, 1, 1])
    assert schedulers.turns == 1


async def test_members_have_no_more_time_at_the_end_of_a_lease_than_the_scheduler_waits(members, tmp_path):
    schedulers = Schedulers([5])
    pid = await start(members, DEAF, stop_grace_seconds=600.0)
    await until((tmp_path / "deaf").exists)
    async with kept(schedulers, members, TermGuard()):
        await until(lambda: schedulers.heard)
        schedulers.hang = True
        await until(lambda: not alive(pid))


async def test_a_lease_ends_while_a_call_to_the_scheduler_hangs(members):
    schedulers = Schedulers([5], hang=True)
    pid = await start(members, "import time; time.sleep(600)")
    async with kept(schedulers, members, TermGuard()):
        await until(lambda: not alive(pid))
        assert schedulers.heard == [0], "the heartbeat is still under way"


async def test_a_stop_that_is_under_way_ends_with_the_lease(members, tmp_path):
    pid = await start(members, DEAF, stop_grace_seconds=600.0)
    await until((tmp_path / "deaf").exists)
    stopping = asyncio.create_task(members.stop("j/role/0", None, "preempted"))
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_SECONDS):
        await members.stop_all("the lease ended", 0.1)
        assert (await stopping).message == "preempted"
    assert not alive(pid)
