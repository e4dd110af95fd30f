"""Nodes that pods of others use too: the scheduler plans with what they leave, before it asks for a grant."""

import subprocess
from pathlib import Path

import pytest
from kube_api import NAMESPACE
from kube_cluster import Cluster
from test_cluster import Door, gang, scheduler

from reflux.scheduler.v1 import scheduler_service_pb2 as pb


def sleeper(argv: list[str], environment: dict[str, str], log: Path) -> int:
    """A pod that does nothing. No code runs between fork and exec: a process that serves gRPC does not survive that."""
    return subprocess.Popen(["sleep", "600"]).pid


@pytest.fixture
async def cluster(tmp_path):
    async with Cluster(tmp_path, sleeper) as cluster:
        for number in range(1, 5):
            await cluster.add_node(f"n{number}")
        yield cluster


async def free_gpus(door: Door, node: str) -> float:
    return (await door.node(node)).free.gpus


async def test_a_gang_goes_around_the_pods_of_others_and_takes_their_room_when_they_leave(cluster, tmp_path, url):
    pod = {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "3"}}}]}
    for node in ("n1", "n3"):
        await cluster.add_foreign_pod(f"on-{node}", {"nodeName": node, **pod})
    options = tmp_path / "kubernetes.toml"
    options.write_text(f'url = "{cluster.url}"\nnamespace = "{NAMESPACE}"\n')
    settings = {"backend": "kubernetes", "backend_options": str(options), "poll_seconds": 0.1}
    async with scheduler(tmp_path, url, **settings) as door:
        await door.until_node("n4", "up")
        assert [await free_gpus(door, node) for node in ("n1", "n2")] == [1, 4]
        job = await door.placed(await door.new(gang(2, gpus=2)))
        assert {place.node for place in job.placements} <= {"c/b/r1/n2", "c/b/r2/n4"}
        large = await door.waits(await door.new(gang(3)))
        asked = await door.simulate(job=pb.CreateJobRequest(roles=[gang(1, gpus=3)]))
        grown = await door.simulate(
            job=pb.CreateJobRequest(roles=[gang(3)]), add_nodes=[pb.SimulatedNode(name="n5", like="n4")]
        )
        assert [each.outcome for each in grown.outcomes if each.job == "jobs/new"] == ["waits"]
        assert asked.total_gpus - asked.held_gpus >= 8, "what others hold is not held by jobs"
        for node in ("n1", "n3"):
            await cluster.remove_foreign_pod(f"on-{node}")
        large = await door.placed(large)
        assert {place.node for place in large.placements} >= {"c/b/r1/n1", "c/b/r2/n3"}
        for each in (job, large):
            await door.cancel(each.name)
        for each in (job, large):
            await door.until(each.name, lambda job: job.ended_at)
