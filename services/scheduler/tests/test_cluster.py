"""The scheduler as operators see it: queues, drains, what-if questions, bad input. Nodes are there, nothing runs."""

import asyncio
import contextlib
import urllib.request
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from scheduler_stack import Client, free_port

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.channel import open_channel
from reflux_kit.errors import StartupError
from reflux_kit.server import running
from reflux_placement.policy.cycle import decide
from reflux_placement.policy.view import Start
from reflux_placement.topology import NOTHING, Node, Topology, build_topology
from reflux_scheduler import planner
from reflux_scheduler.backends import BACKENDS
from reflux_scheduler.backends.local import LocalBackend
from reflux_scheduler.main import SchedulerSettings, build

TOPOLOGY = """
[cluster]
name = "c"
[node_types.tray]
gpus = 4
cpus = 64
memory = "64GiB"
rails = ["a", "b"]
[[block]]
name = "b"
[[block.rack]]
name = "r1"
node_type = "tray"
nodes = ["n1", "n2"]
[[block.rack]]
name = "r2"
node_type = "tray"
nodes = ["n3", "n4"]
"""
QUEUES = """
[queues.science]
weight = 2
guaranteed = { gpus = 8 }
[queues.alloys]
parent = "science"
limit = { gpus = 4 }
[queues.oxides]
parent = "science"
"""


class Door(Client):
    """A client of a scheduler whose nodes are all there."""

    async def new(self, *roles: job_pb2.RoleSpec, **fields) -> job_pb2.Job:
        request = pb.CreateJobRequest(request_id=str(uuid.uuid4()), display_name="t", roles=roles, **fields)
        return (await self.stub.CreateJob(request, timeout=10)).job

    async def register(self, *nodes: str) -> None:
        """Agents that nobody can call: jobs get their place and no further."""
        for node in nodes:
            await self.register_as(node, node)

    async def register_as(self, node: str, incarnation: str) -> None:
        request = pb.RegisterAgentRequest(node=node, address="127.0.0.1:9", incarnation=incarnation)
        await self.stub.RegisterAgent(request, timeout=10)

    async def leave(self, node: str, incarnation: str) -> None:
        request = pb.AgentHeartbeatRequest(node=node, incarnation=incarnation, leaving=True)
        await self.stub.AgentHeartbeat(request, timeout=10)

    async def node(self, node: str) -> pb.TopologyNode:
        answer = await self.stub.GetTopology(pb.GetTopologyRequest(), timeout=10)
        return next(each for each in answer.nodes if each.path.endswith(f"/{node}"))

    async def until_node(self, node: str, state: str) -> pb.TopologyNode:
        async with asyncio.timeout(20):
            while (seen := await self.node(node)).state != state:
                await asyncio.sleep(0.01)
        return seen

    async def placed(self, job: job_pb2.Job) -> job_pb2.Job:
        return await self.until(job.name, lambda job: job.placements)

    async def waits(self, job: job_pb2.Job) -> job_pb2.Job:
        return await self.until(job.name, lambda job: job.message.startswith("waits: "))

    async def explain(self, job: job_pb2.Job) -> pb.ExplainJobResponse:
        return await self.stub.ExplainJob(pb.ExplainJobRequest(name=job.name), timeout=10)

    async def simulate(self, **fields) -> pb.SimulateResponse:
        return await self.stub.Simulate(pb.SimulateRequest(**fields), timeout=10)


def gang(count: int, gpus: float = 4, role: str = "learner", **fields) -> job_pb2.RoleSpec:
    resources = common_pb2.Resources(gpus=gpus, cpus=0.1)
    return job_pb2.RoleSpec(role=role, count=count, argv=["true"], resources=resources, **fields)


@contextlib.asynccontextmanager
async def scheduler(
    folder: Path, url: str, queues: str = "", topology: str = TOPOLOGY, **fields: float | str
) -> AsyncIterator[Door]:
    (folder / "topology.toml").write_text(topology)
    (folder / "queues.toml").write_text(queues)
    settings = SchedulerSettings(
        listen="127.0.0.1:0",
        drain_seconds=0,
        redis_url=url,
        topology=str(folder / "topology.toml"),
        queues=str(folder / "queues.toml") if queues else "",
        lease_seconds=600,
        heartbeat_seconds=300,
        **fields,
    )
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        yield Door(channel)


@pytest.fixture
async def door(tmp_path, url):
    async with scheduler(tmp_path, url, QUEUES) as door:
        await door.register("n1", "n2", "n3", "n4")
        yield door


async def test_a_queue_above_its_limit_waits_for_quota_and_holds_up_nobody(door):
    first = await door.placed(await door.new(gang(1), queue="alloys"))
    second = await door.waits(await door.new(gang(1), queue="alloys"))
    answer = await door.explain(second)
    assert answer.cause == "quota"
    assert "alloys" in answer.sentence
    await door.placed(await door.new(gang(2), queue="oxides"))
    queues = {queue.name: queue for queue in (await door.stub.ListQueues(pb.ListQueuesRequest())).queues}
    assert set(queues) == {"default", "science", "alloys", "oxides"}
    assert [queues[name].used.gpus for name in ("alloys", "oxides", "science")] == [4, 8, 12]
    assert (queues["alloys"].pending_jobs, queues["alloys"].placed_jobs) == (1, 1)
    assert (queues["alloys"].limit.gpus, queues["science"].guaranteed.gpus) == (4, 8)
    await door.cancel(first.name)


async def test_fifty_queues_are_served_in_one_cycle(tmp_path, url, monkeypatch):
    starts: list[int] = []

    def counted(*words):
        decision = decide(*words)
        starts.append(sum(isinstance(action, Start) for action in decision.actions))
        return decision

    monkeypatch.setattr(planner, "decide", counted)
    queues = "".join(f"[queues.q{number}]\nweight = {1 + number % 5}\n" for number in range(50))
    async with scheduler(tmp_path, url, queues) as door:
        jobs = [await door.new(gang(1, gpus=0), queue=f"q{number}") for number in range(50)]
        assert all(job.state == job_pb2.Job.STATE_PENDING for job in jobs)
        await door.register("n1")
        for job in jobs:
            await door.placed(job)
    assert [count for count in starts if count] == [50]


async def test_a_drained_node_takes_no_work_until_it_is_opened_and_a_restart_remembers(tmp_path, url):
    async with scheduler(tmp_path, url) as door:
        await door.register("n1", "n2", "n3", "n4")
        node = (await door.stub.DrainNode(pb.DrainNodeRequest(node="c/b/r1/n1", reason="new fan"), timeout=10)).node
        assert (node.path, node.state, node.reason) == ("c/b/r1/n1", "draining", "new fan")
        waiting = await door.waits(await door.new(gang(4)))
        assert (await door.explain(waiting)).cause == "nodes_away"
        small = await door.placed(await door.new(gang(2), required_level="rack"))
        assert {place.node for place in small.placements} == {"c/b/r2/n3", "c/b/r2/n4"}
    async with scheduler(tmp_path, url) as door:
        await door.register("n1", "n2", "n3", "n4")
        states = {node.path: node.state for node in (await door.stub.GetTopology(pb.GetTopologyRequest())).nodes}
        assert states["c/b/r1/n1"] == "draining"
        node = (await door.stub.UndrainNode(pb.UndrainNodeRequest(node="n1"), timeout=10)).node
        assert node.state == "up"
        await door.cancel(waiting.name)
        other = await door.placed(await door.new(gang(2), required_level="rack"))
        assert {place.node for place in other.placements} == {"c/b/r1/n1", "c/b/r1/n2"}


async def test_the_topology_is_shown_with_levels_rails_and_nodes_without_agents(tmp_path, url):
    async with scheduler(tmp_path, url) as door:
        await door.register("n1")
        answer = await door.stub.GetTopology(pb.GetTopologyRequest())
        assert (list(answer.levels), answer.backend) == (["node", "rack", "block", "cluster"], "local")
        by_path = {node.path: node for node in answer.nodes}
        assert list(by_path["c/b/r1/n1"].rails) == ["a", "b"]
        assert by_path["c/b/r1/n2"].state == "down"


async def test_what_if_answers_from_the_policy_and_changes_nothing(door):
    held = await door.placed(await door.new(gang(3)))
    new = pb.CreateJobRequest(roles=[gang(2)])
    answer = await door.simulate(job=new)
    outcomes = {each.job: each.outcome for each in answer.outcomes}
    assert outcomes == {"jobs/new": "waits"}
    assert (answer.held_gpus, answer.total_gpus) == (12, 16)
    ended = await door.simulate(job=new, end_jobs=[held.name])
    (started,) = [each for each in ended.outcomes if each.job == "jobs/new"]
    assert (started.outcome, ended.held_gpus) == ("starts", 8)
    assert started.domain in ("c/b/r1", "c/b/r2")
    grown = await door.simulate(job=new, add_nodes=[pb.SimulatedNode(name="n5", like="n4")])
    assert [each.outcome for each in grown.outcomes if each.job == "jobs/new"] == ["starts"]
    assert grown.total_gpus == 20
    place = held.placements[0].node
    broken = await door.simulate(remove_nodes=[place])
    assert {each.job: each.outcome for each in broken.outcomes} == {held.name: "replaced"}
    never = await door.simulate(job=pb.CreateJobRequest(roles=[gang(5)]))
    assert [each.outcome for each in never.outcomes] == ["never"]
    assert "20 GPUs" in never.sentence
    urgent = await door.simulate(job=pb.CreateJobRequest(roles=[gang(4)], priority=9))
    outcomes = {each.job: each.outcome for each in urgent.outcomes}
    assert outcomes == {held.name: "preempted", "jobs/new": "starts"}
    assert "1 job(s) would be preempted" in urgent.sentence
    assert urgent.held_gpus == 16
    drained = await door.simulate(job=new, end_jobs=[held.name], drain_nodes=["n1", "n3"])
    assert {each.job: each.outcome for each in drained.outcomes} == {"jobs/new": "starts"}
    (across,) = drained.outcomes
    assert across.domain == "c/b"
    assert across.cost.traffic > started.cost.traffic > 0
    assert across.cost.total > started.cost.total
    drained = await door.simulate(job=new, end_jobs=[held.name], drain_nodes=["n1", "n2", "n3"])
    assert {each.job: each.outcome for each in drained.outcomes} == {"jobs/new": "waits"}
    after = await door.get(held.name)
    assert list(after.placements) == list(held.placements)
    assert not after.preemptions
    assert len((await door.stub.GetTopology(pb.GetTopologyRequest())).nodes) == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"queue": "none"}, "there is no such queue; known: alloys, default"),
        ({"required_level": "pod"}, "known: node, rack, block, cluster"),
        ({"preferred_level": "pod"}, "preferred_level"),
        ({"expected_seconds": -1.0}, "expected_seconds"),
        ({"relations": [job_pb2.RoleRelation(role="learner", near="x")]}, "two different roles"),
        ({"relations": [job_pb2.RoleRelation(role="learner", near="e", level="zone9")]}, "zone9"),
        ({"roles": [gang(4, segment_size=3)]}, "does not divide"),
        ({"roles": [gang(4, segment_size=2, segment_level="shelf")]}, "shelf"),
        ({"roles": [gang(4, min_count=5)]}, "min_count <= count"),
        ({"roles": [gang(4, max_per_domain=1)]}, "spread_level"),
        ({"roles": [gang(60_000)]}, "at most 50000"),
        ({"roles": [gang(0), gang(0, role="other")]}, "there is nothing to run"),
        ({"roles": [gang(1), gang(1)]}, "two roles share this name"),
    ],
)
async def test_a_bad_job_is_refused_with_key_and_way_out(door, fields, words):
    fields = {"roles": [gang(1), gang(1, role="e")], **fields}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await door.new(*fields.pop("roles"), **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


async def test_a_role_of_nobody_is_placed_with_the_others(door):
    job = await door.placed(await door.new(gang(1), gang(0, role="spectator")))
    assert [place.role for place in job.placements] == ["learner"]


async def test_segments_and_relations_are_kept(door):
    relation = job_pb2.RoleRelation(role="decode", near="learner", level="rack")
    job = await door.placed(
        await door.new(gang(2, gpus=3, segment_size=2), gang(2, gpus=1, role="decode"), relations=[relation])
    )
    racks = {place.node.rpartition("/")[0] for place in job.placements}
    assert len(racks) == 1
    assert (await door.explain(job)).domain == racks.pop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[queues.a]\nparent = 'b'\n[queues.b]\nparent = 'a'\n", "queues.a.parent"),
        ("[queues.a]\nweight = 0\n", "queues.a.weight"),
        ("[queues.a]\nlimit = { gpu = 4 }\n", "known here: cpus, gpus, memory"),
        ("[queues.A]\n", "lower-case"),
        ("[policy]\nbackfill = 3\n", "policy.backfill"),
        ("[policy]\nreservations = -1\n", "reservations"),
        ("[policy]\npreemption = 1\n", "is not of type bool"),
        ("nonsense [", "is not TOML"),
    ],
)
async def test_bad_queues_stop_the_start_with_file_and_key(tmp_path, url, text, words):
    with pytest.raises(StartupError) as caught:
        async with scheduler(tmp_path, url, text):
            pass
    assert str(tmp_path) in str(caught.value)
    assert words in str(caught.value)


async def test_a_node_that_is_there_twice_stops_the_start(tmp_path, url):
    with pytest.raises(StartupError, match="is there twice"):
        async with scheduler(tmp_path, url, topology=TOPOLOGY.replace('"n4"', '"n1"')):
            pass


@pytest.mark.slow
async def test_a_node_that_dies_and_comes_again_gets_no_work_until_it_was_quiet(tmp_path, url):
    async with scheduler(tmp_path, url, flap_half_life_seconds=0.7, flap_longest_seconds=2.1) as door:
        await door.register("n1", "n2", "n3", "n4")
        for boot in range(3):
            assert (await door.node("n1")).state == "up"
            await door.register_as("n1", f"boot-{boot}")
        flapping = await door.until_node("n1", "flapping")
        assert flapping.reason == "failed 3 times"
        small = await door.placed(await door.new(gang(2), required_level="rack"))
        assert {place.node for place in small.placements} == {"c/b/r2/n3", "c/b/r2/n4"}
        large = await door.waits(await door.new(gang(2), required_level="rack"))
        large = await door.placed(large)
        assert {place.node for place in large.placements} == {"c/b/r1/n1", "c/b/r1/n2"}
        assert (await door.node("n1")).state == "up"


async def test_an_agent_that_was_told_to_stop_is_no_failure(tmp_path, url):
    async with scheduler(tmp_path, url) as door:
        await door.register("n1", "n2")
        for boot in range(5):
            await door.leave("n1", "n1" if not boot else f"boot-{boot}")
            assert (await door.until_node("n1", "down")).reason == "its agent is silent"
            await door.register_as("n1", f"boot-{boot + 1}")
            await door.until_node("n1", "up")


async def test_agents_of_a_grant_that_come_and_go_say_nothing_of_their_node(tmp_path, url):
    async with scheduler(tmp_path, url) as door:
        await door.register("n1")
        for boot in range(5):
            request = pb.RegisterAgentRequest(
                node="n1", address="127.0.0.1:9", incarnation=f"boot-{boot}", grant="ab12-0"
            )
            await door.stub.RegisterAgent(request, timeout=10)
        await door.register("n2")
        await door.until_node("n2", "up")
        assert (await door.node("n1")).state == "up"


async def test_the_only_node_is_never_left_out(tmp_path, url):
    one = TOPOLOGY.replace('"n1", "n2"', '"n1"').partition('[[block.rack]]\nname = "r2"')[0]
    async with scheduler(tmp_path, url, topology=one) as door:
        for boot in range(6):
            await door.register_as("n1", f"boot-{boot}")
        await door.placed(await door.new(gang(1)))
        assert (await door.node("n1")).state == "up"


async def test_a_damping_that_does_nothing_stops_the_start(tmp_path, url):
    with pytest.raises(StartupError, match=r"FLAP.*can never pass suppress"):
        async with scheduler(tmp_path, url, flap_longest_seconds=10):
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[queues.a]\nguaranteed = { gpus = 12 }\n[queues.b]\nguaranteed = { gpus = 8 }\n", ("a, b", "20", "16")),
        (
            "[queues.a]\nguaranteed = { gpus = 4 }\n[queues.b]\nparent = 'a'\nguaranteed = { gpus = 6 }\n",
            ("queue a", "6", "4"),
        ),
        ("[queues.a]\nguaranteed = { gpus = 4 }\nlimit = { gpus = 2 }\n", ("queue a", "4", "2")),
    ],
)
async def test_queues_that_are_promised_more_than_there_is_stop_the_start(tmp_path, url, text, words):
    with pytest.raises(StartupError) as caught:
        async with scheduler(tmp_path, url, text):
            pass
    assert "queues.toml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


async def test_a_cluster_whose_topology_is_none_stops_the_start(monkeypatch, url):
    class Broken(LocalBackend):
        async def discover(self) -> Topology | None:
            return build_topology("c", [Node("n1", NOTHING), Node("n1", NOTHING)])

    monkeypatch.setitem(BACKENDS, "local", lambda options, launch: Broken())
    with pytest.raises(StartupError, match=r"n1.*REFLUX_SCHEDULER_TOPOLOGY"):
        async with build(SchedulerSettings(listen="127.0.0.1:0", redis_url=url)):
            pass


async def test_a_watch_that_is_resumed_tells_only_what_is_new(door):
    job = await door.placed(await door.new(gang(1)))
    first = await _next(door, job, "")
    seen = [event.text for event in first.events]
    assert any(text.startswith("PLACED") for text in seen)
    await door.cancel(job.name)
    second = await _next(door, job, first.resume_token)
    assert int(second.resume_token) > int(first.resume_token)
    told = [event.text for event in second.events]
    assert any("cancelled on request" in text for text in told)
    assert not set(told) & set(seen)
    # Nothing is new after the last token: the stream stays silent.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await _next(door, job, second.resume_token)


async def _next(door: Door, job: job_pb2.Job, token: str) -> pb.WatchJobResponse:
    request = pb.WatchJobRequest(name=job.name, resume_token=token)
    async for change in door.stub.WatchJob(request, timeout=10):
        return change
    raise AssertionError("the stream ended")


async def test_a_start_that_an_absent_agent_holds_up_is_given_up_with_the_reason(tmp_path, url):
    async with scheduler(tmp_path, url, start_seconds=0.3) as door:
        await door.register("n1")
        job = await door.new(gang(1))
        job = await door.until(job.name, lambda job: any(event.kind == "requeued" for event in job.events))
        (told,) = [event.text for event in job.events if event.kind == "requeued"]
        assert told == "it did not start within 0.3 s: 1 node(s) are not ready (n1): their members do not run"


async def test_use_broken_room_and_lost_work_can_be_read_as_metrics(tmp_path, url):
    address = f"127.0.0.1:{free_port()}"

    async def figure(name: str) -> float:
        text = (await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics")).read().decode()
        (line,) = [line for line in text.splitlines() if line.startswith(f"reflux_scheduler_{name} ")]
        return float(line.rpartition(" ")[2])

    async def until_figure(name: str, value: float) -> None:
        async with asyncio.timeout(20):
            while await figure(name) != pytest.approx(value):
                await asyncio.sleep(0.05)

    async with scheduler(tmp_path, url, http_listen=address) as door:
        await door.register("n1", "n2", "n3", "n4")
        lost = await figure("preempted_work_lost_seconds_total")
        job = await door.placed(await door.new(gang(1, gpus=3)))
        await until_figure("utilisation", 3 / 16)
        assert await figure('fragmentation{level="node"}') == pytest.approx(1 / 13)
        assert await figure('fragmentation{level="rack"}') == pytest.approx(5 / 13)
        await door.new(gang(4), priority=9)
        await door.until(job.name, lambda job: job.preemptions)
        async with asyncio.timeout(20):
            while await figure("preempted_work_lost_seconds_total") <= lost:
                await asyncio.sleep(0.05)
