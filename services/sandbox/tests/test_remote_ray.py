"""Verification jobs on graders of a real Ray cluster on this host."""

import asyncio
import contextlib
import socket

import pytest

from reflux_sandbox.execution import SessionLost
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote.ray import RayBackend
from reflux_sandbox.remote.settings import RaySettings

pytest.importorskip("ray", reason="Ray is not installed: pip install 'reflux-sandbox[ray]'")
import ray_cluster

pytestmark = pytest.mark.slow

HANG_SECONDS = 120


def info(name, version="1"):
    return VerifierInfo(name=name, version=version, fidelity="rule", trusted=False, cost_seconds=0.1)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.running("r0n0", "r1n0") as running:
        yield running


@pytest.fixture
async def place(cluster, monkeypatch, isolation_options, namespaces):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    options = isolation_options()
    node = {"isolation": "prefork", "graders": options["graders"], "import_folders": list(options["import_folders"])}
    backend = RayBackend(RaySettings(address=cluster.address, actors=2), node)
    await backend.start()
    yield backend
    await backend.close()


async def grade(place, verifier, *answers):
    async with place.session(verifier) as session:
        return await asyncio.wait_for(session.grade(verifier.name, "{}", list(answers)), HANG_SECONDS)


async def until(condition):
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


async def test_graders_on_nodes_answer_refuse_and_survive_a_crash(place):
    answers = await asyncio.gather(*(grade(place, info("test/length"), "x" * n) for n in range(1, 9)))
    assert [answer["grades"][0]["reward"] for answer in answers] == list(range(1, 9))
    assert (await grade(place, info("test/length", version="2"), "a"))["error"] == "unavailable"
    assert (await grade(place, info("test/crash"), "segfault"))["error"] == "crash"
    assert (await grade(place, info("test/length"), "aa"))["grades"][0]["reward"] == 2


async def test_a_cancelled_job_frees_its_grader(place):
    hanging = [asyncio.create_task(grade(place, info("test/slow"), "600")) for _ in range(2)]
    await until(lambda: len(place._calls) == 2)
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging)
    assert (await grade(place, info("test/length"), "aa"))["grades"][0]["reward"] == 2


async def test_jobs_of_a_driver_that_dies_are_lost_and_the_next_one_starts_another(place):
    assert "grades" in await grade(place, info("test/length"), "a")
    hanging = asyncio.create_task(grade(place, info("test/slow"), "600"))
    await until(lambda: len(place._calls) == 1)
    assert place._process is not None
    place._process.kill()
    with pytest.raises(SessionLost, match="driver has ended"):
        await hanging
    assert "grades" in await grade(place, info("test/length"), "b")


async def test_a_cluster_that_is_not_there_is_a_lost_session():
    with socket.socket() as deaf:  # bound and not listening: nobody else can answer there
        deaf.bind(("127.0.0.1", 0))
        backend = RayBackend(RaySettings(address=f"127.0.0.1:{deaf.getsockname()[1]}", open_seconds=5), {})
        await backend.start()
        with pytest.raises(SessionLost, match="Ray"):
            await grade(backend, info("test/length"), "a")
    with contextlib.suppress(SessionLost):
        await backend.close()
