"""Starts that do not come about: the job says why, and is tried elsewhere."""

import time
from dataclasses import replace

import pytest
from fake_cluster import SPEC, FakeCluster, candidate, until

from reflux_scheduler.driver import MAX_SLOW_STARTS


async def test_room_on_which_no_agent_comes_is_given_back_and_other_nodes_are_tried(keys):
    cluster = FakeCluster("n1", "n2", "n3", "n4")
    leader = await candidate(keys, cluster, 600, start_seconds=0.2)
    async with leader.standing("a:1", "a"):
        controller = await leader.leading()
        job = await controller.create(SPEC, "one")
        await until(lambda: controller.book.get(job.id).final)
        job = controller.book.get(job.id)
        assert job.state == "FAILED"
        nodes = [share.node for grant in cluster.asked for share in grant.shares]
        assert (len(nodes), len(set(nodes))) == (MAX_SLOW_STARTS, MAX_SLOW_STARTS)
        assert f"not ready ({nodes[-1]}): no agent on 1 of them; given up after 3 attempts" in job.message
        told = [event.text for event in job.events if event.kind == "requeued"]
        assert told[0] == f"it did not start within 0.2 s: 1 node(s) are not ready ({nodes[0]}): no agent on 1 of them"
        assert [controller.nodes.state(node)[0] for node in nodes[:2]] == ["flapping", "flapping"]
        assert cluster.given == {}


@pytest.mark.slow
async def test_nodes_are_not_blamed_when_no_agent_comes_anywhere(keys):
    cluster = FakeCluster("n1", "n2")
    leader = await candidate(keys, cluster, 600, start_seconds=0.2)
    async with leader.standing("a:1", "a"):
        controller = await leader.leading()
        jobs = [await controller.create(SPEC, name) for name in ("one", "two")]
        await until(lambda: all(controller.book.get(job.id).final for job in jobs))
        assert len([node for node in cluster.nodes if controller.nodes.state(node)[0] == "flapping"]) <= 1


@pytest.mark.slow
async def test_room_that_the_cluster_does_not_give_is_given_up_for_other_room(keys):
    cluster = FakeCluster("n1", "n2")
    leader = await candidate(keys, cluster, 600, grant_seconds=1.5)
    async with leader.standing("a:1", "a"):
        controller = await leader.leading()
        cluster.busy = frozenset({"n1", "n2"})
        job = await controller.create(SPEC, "one")
        await until(lambda: cluster.asked)
        (first,) = cluster.asked[0].shares
        cluster.busy = frozenset({first.node})
        await until(lambda: controller.book.get(job.id).parts[:1] and len(cluster.asked) > 1)
        await until(lambda: controller.book.get(job.id).parts[0].state == "granted")
        (second,) = cluster.asked[1].shares
        assert second.node != first.node
        assert cluster.released[0] == cluster.asked[0].id
        job = controller.book.get(job.id)
        told = [event.text for event in job.events if event.kind == "requeued"]
        assert told == ["the cluster did not give its room within 1.5 s: somebody else is there"]
        assert job.slow_starts == 0


async def test_agents_of_a_grant_that_was_given_back_are_forgotten(keys):
    cluster = FakeCluster("n1", "n2")
    leader = await candidate(keys, cluster, 600)
    async with leader.standing("a:1", "a"):
        controller = await leader.leading()
        two = replace(SPEC, roles=(replace(SPEC.roles[0], count=2),))
        job = await controller.create(two, "one")
        await until(lambda: controller.book.get(job.id).parts and cluster.asked)
        post = ("n1", cluster.asked[0].id)
        controller.fleet.register(post, "127.0.0.1:9", "a", (), time.monotonic())
        await controller.cancel(job.id)
        await until(lambda: controller.book.get(job.id).final)
        await until(lambda: not controller.fleet.agents())
