"""Starts and stops members through the agents of their nodes: one channel per agent, opened on first use."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import grpc

from reflux.scheduler.v1 import agent_service_pb2 as pb
from reflux.scheduler.v1.agent_service_pb2_grpc import AgentServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings
from reflux_placement.room import gpu_indices
from reflux_placement.topology import Topology
from reflux_scheduler.fleet import Fleet, Post
from reflux_scheduler.job import Heard, Job, Seat
from reflux_scheduler.ledger import gpus_on
from reflux_scheduler.parse import parse_report
from reflux_scheduler.render import render_role

if TYPE_CHECKING:
    from reflux.scheduler.v1.agent_service_pb2_grpc import AgentServiceAsyncStub

_START_SECONDS = 15.0
_STOP_MARGIN_SECONDS = 5.0


class AgentAway(ConnectionError):
    """An agent does not answer; the same call may succeed soon, and may already have been carried out."""


class StartRefused(RuntimeError):
    """The agent will never start this member; the message says why."""


class Crew:
    """The agents as callees. Calls are idempotent by (job, role, rank, attempt), because they are repeated after a
    crash or a lost answer: a member that runs is left alone, a member that is gone stays gone."""

    def __init__(self, fleet: Fleet, topology: Topology, settings: ServiceSettings) -> None:
        self._fleet = fleet
        self._topology = topology
        self._settings = settings
        self._channels: dict[Post, tuple[str, grpc.aio.Channel]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self.term = 0
        """Term of this scheduler; agents refuse calls of a lower one than they have seen."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, channel in self._channels.values():
            await channel.close()

    async def start(self, job: Job, seat: Seat) -> Heard:
        """Starts a member; the agent's word about it. Raises AgentAway or StartRefused."""
        post = (seat.node, job.grant_id(seat.part))
        incarnation, stub = self._stub(post)
        gpus = gpu_indices(seat.gpus)
        request = pb.StartRoleRequest(
            role_id=job.role_id(seat),
            spec=render_role(job.spec.role(seat.role)),
            job=job.name,
            rank=seat.rank,
            gpu_indices=gpus,
            node_gpu_indices=gpus_on(job, seat) if gpus else (),
            rails=self._rails(seat.node, gpus),
            term=self.term,
            attempt=job.attempt,
        )
        # An elastic role tells its members how many there are now.
        request.spec.count = (
            len(next(p.nodes for p in job.placement.roles if p.role == seat.role)) if job.placement else 0
        )
        try:
            response = await stub.StartRole(request, timeout=_START_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise StartRefused(error.details() or "") from None
            raise _away(post, error) from None
        report = parse_report(response.role)
        return Heard(incarnation, {report.role_id: report})

    async def stop(self, job: Job, seat: Seat, *, wait: bool = True) -> Heard | None:
        """Stops a member, after its role's grace by force; None when there is none. Raises AgentAway.

        Args:
            job: the job that the member belongs to.
            seat: where it is.
            wait: answer when it is gone; else as soon as it was told to stop.
        """
        post = (seat.node, job.grant_id(seat.part))
        incarnation, stub = self._stub(post)
        grace = job.spec.role(seat.role).stop_grace_seconds
        request = pb.StopRoleRequest(role_id=job.role_id(seat), grace_seconds=grace, term=self.term, no_wait=not wait)
        try:
            response = await stub.StopRole(request, timeout=_STOP_MARGIN_SECONDS + (grace if wait else 0.0))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise _away(post, error) from None
        report = parse_report(response.role)
        return Heard(incarnation, {report.role_id: report})

    async def forget(self, post: Post) -> None:
        """Closes the channel to an agent whose grant is over."""
        _, channel = self._channels.pop(post, ("", None))
        if channel is not None:
            await channel.close()

    def _rails(self, node: str, gpus: tuple[int, ...]) -> list[str]:
        """NIC rails next to the GPUs, in their order, each once."""
        if node not in self._topology:
            return []
        machine = self._topology.nodes[self._topology.index_of(node)]
        rails = machine.rails
        if not rails:
            return []
        return list(dict.fromkeys(rails[gpu * len(rails) // max(1, machine.resources.gpus)] for gpu in gpus))

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Closes a channel to an address that is no longer used, once its calls are over."""
        task = asyncio.create_task(channel.close(grace=_START_SECONDS))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _stub(self, post: Post) -> tuple[str, "AgentServiceAsyncStub"]:
        agent = self._fleet.agent(post)
        if agent is None:
            raise AgentAway(f"node {post[0]} has no registered agent")
        address, channel = self._channels.get(post, ("", None))
        if channel is None or address != agent.address:
            if channel is not None:
                self._retire(channel)
            channel = open_channel(agent.address, self._settings, subject="scheduler")
            self._channels[post] = (agent.address, channel)
        return agent.incarnation, cast("AgentServiceAsyncStub", AgentServiceStub(channel))


def _away(post: Post, error: grpc.aio.AioRpcError) -> AgentAway:
    return AgentAway(f"the agent of node {post[0]} answered {error.code().name}: {error.details()}")
