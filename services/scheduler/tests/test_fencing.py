"""What a deposed leader does to the cluster: it releases nothing and asks for nothing any more."""

import contextlib
from dataclasses import replace

import pytest
from fake_cluster import SPEC, FakeCluster, candidate, until

from reflux_scheduler.backends.base import GrantStatus
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Job, Placement, RolePlaces
from reflux_scheduler.store import LEADER, Store


async def test_a_deposed_leader_does_not_release_the_grants_of_the_next_one(keys):
    cluster = FakeCluster("n1")
    # The first renews its lease once in 200 s: what happens until then it does not hear, like one behind a partition.
    first, second = await candidate(keys, cluster, 600), await candidate(keys, cluster, 0.3)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(first.standing("a:1", "a"))
        await first.leading()
        await keys.delete(LEADER)
        await stack.enter_async_context(second.standing("b:1", "b"))
        controller = await second.leading()
        job = await controller.create(SPEC, "one")
        await until(lambda: cluster.given or cluster.released)
        await until(lambda: not first.term or cluster.released)
        assert cluster.released == []
        assert list(cluster.given) == [f"{job.id}-0"]
        assert second.term


async def test_a_leader_gives_back_what_belongs_to_no_job(keys):
    cluster = FakeCluster("n1")
    cluster.given["stray-0"] = GrantStatus("stray-0", "granted")
    leader = await candidate(keys, cluster, 600)
    async with leader.standing("a:1", "a"):
        await until(lambda: cluster.released)
        assert cluster.released == ["stray-0"]
        assert leader.term


async def test_a_deposed_leader_asks_for_nothing_and_gives_nothing_back(keys):
    cluster, store = FakeCluster("n1"), Store(keys)
    store.lease = "1 a:1 a"
    await keys.set(LEADER, "2 b:1 b")
    grants = Grants(cluster, 600, lambda _: None, store.confirm)
    places = Placement("node", "c/r/n1", (RolePlaces("learner", ("n1",), (1,), (0,)),))
    with pytest.raises(NotLeading):
        await grants.request(replace(Job("j", 1, SPEC, 0.0), placement=places), 0)
    assert cluster.given == {}
    cluster.given["k-0"] = GrantStatus("k-0", "granted")
    with pytest.raises(NotLeading):
        await grants.look(frozenset)
    assert cluster.released == []
