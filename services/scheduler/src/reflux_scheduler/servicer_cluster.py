"""What operators call: the topology with its conditions, drains, queues, and what-if questions."""

from typing import Any

from redis.exceptions import RedisError

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import Unavailable
from reflux_placement.room import Room
from reflux_placement.topology import Resources
from reflux_scheduler.controller import Controller
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.ledger import job_of, usage
from reflux_scheduler.parse import MAX_TEXT, parse_node
from reflux_scheduler.render import render_resources
from reflux_scheduler.servicer_agents import AgentsPart
from reflux_scheduler.whatif import what_if


class ClusterPart(AgentsPart):
    """Nodes and queues."""

    async def GetTopology(self, request: pb.GetTopologyRequest, context: Any) -> pb.GetTopologyResponse:
        """All nodes with what is free and who is there."""
        controller = await self._candidate.leading()
        jobs, room = _jobs_by_node(controller), controller.planner.room()
        topology = controller.topology
        return pb.GetTopologyResponse(
            nodes=[_node(controller, room, index, jobs) for index in range(topology.num_nodes)],
            cluster=topology.name,
            levels=topology.levels,
            backend=self._candidate.plan.backend_name,
        )

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Any) -> pb.DrainNodeResponse:
        """Lets a node run empty."""
        node = parse_node(self._candidate.topology, request.node)
        return pb.DrainNodeResponse(node=await self._drain(node, request.reason[:MAX_TEXT] or "drained on request"))

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: Any) -> pb.UndrainNodeResponse:
        """Opens a drained node again."""
        node = parse_node(self._candidate.topology, request.node)
        return pb.UndrainNodeResponse(node=await self._drain(node, None))

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Any) -> pb.ListQueuesResponse:
        """All queues with their shares and what they use."""
        controller = await self._candidate.leading()
        used = {name: Resources(*(int(x) for x in row)) for name, row in usage(controller.book.jobs).items()}
        for queue in reversed(list(controller.queues.values())):
            if queue.parent:
                below = used.get(queue.name, Resources())
                used[queue.parent] = used.get(queue.parent, Resources()) + below
        jobs = [job for job in controller.book.jobs.values() if not job.final]
        return pb.ListQueuesResponse(
            queues=[
                pb.Queue(
                    name=queue.name,
                    parent=queue.parent,
                    weight=queue.weight,
                    guaranteed=render_resources(queue.guaranteed),
                    limit=render_resources(queue.limit) if queue.limit is not None else None,
                    used=render_resources(used.get(queue.name, Resources())),
                    pending_jobs=sum(job.spec.queue == queue.name and job.state == "PENDING" for job in jobs),
                    placed_jobs=sum(job.spec.queue == queue.name and job.state != "PENDING" for job in jobs),
                )
                for queue in controller.queues.values()
            ]
        )

    async def Simulate(self, request: pb.SimulateRequest, context: Any) -> pb.SimulateResponse:
        """What the policy would do after a change; changes nothing."""
        return await what_if(await self._candidate.leading(), request)

    async def _drain(self, node: str, why: str | None) -> pb.TopologyNode:
        controller = await self._candidate.leading()
        try:
            await controller.drain(node, why)
        except NotLeading as error:
            raise Unavailable(str(error), leader=error.leader) from None
        except RedisError as error:
            raise Unavailable(f"Redis does not answer ({type(error).__name__}); nothing was changed") from None
        index = controller.topology.index_of(node)
        return _node(controller, controller.planner.room(), index, _jobs_by_node(controller))


def _jobs_by_node(controller: Controller) -> dict[int, list[str]]:
    jobs: dict[int, list[str]] = {}
    for booking, holding in controller.ledger.room.holdings.items():
        name = job_of(booking)
        for node in set(holding.node_M.tolist()):
            if name not in jobs.setdefault(node, []):
                jobs[node].append(name)
    return jobs


def _node(controller: Controller, room: Room, index: int, jobs: dict[int, list[str]]) -> pb.TopologyNode:
    node = controller.topology.nodes[index]
    agent = controller.fleet.agent((node.name, ""))
    state, reason = controller.nodes.state(node.name)
    return pb.TopologyNode(
        path=controller.topology.path(index),
        capacity=render_resources(node.resources),
        free=render_resources(Resources(*room.free_NR[index].tolist())),
        agent_address=agent.address if agent is not None else "",
        jobs=sorted(jobs.get(index, ())),
        state=state,
        reason=reason,
        spare=index in controller.nodes.spares,
        rails=node.rails,
    )
