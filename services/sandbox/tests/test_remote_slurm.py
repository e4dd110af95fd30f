"""Verification jobs as arrays of a real Slurm on this host."""

import asyncio
import contextlib

import pytest
import slurm_cluster

from reflux_sandbox.execution import SessionLost
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote.settings import SlurmSettings
from reflux_sandbox.remote.slurm import SlurmBackend

pytestmark = pytest.mark.slow

HANG_SECONDS = 90


def info(name, fidelity="rule"):
    return VerifierInfo(name=name, version="1", fidelity=fidelity, trusted=False, cost_seconds=0.1)


@pytest.fixture(scope="module")
def cluster():
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster(slurm_cluster.Layout(racks=(2,), gpus=0)) as running:
        yield running


@pytest.fixture
def settings(cluster, tmp_path):
    return SlurmSettings(
        folder=str(tmp_path), conf=str(cluster.conf), memory_mib=512, poll_seconds=0.3, gather_seconds=0.3
    )


@pytest.fixture
def node(isolation_options, namespaces):
    options = isolation_options()
    return {"isolation": "prefork", "graders": options["graders"], "import_folders": list(options["import_folders"])}


@contextlib.asynccontextmanager
async def backend(settings, node):
    made = SlurmBackend(settings, node)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def grade(place, verifier, *answers):
    async with place.session(verifier) as session:
        return await asyncio.wait_for(session.grade(verifier.name, "{}", list(answers)), HANG_SECONDS)


async def until(condition):
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


async def test_jobs_that_come_together_are_one_array_and_each_has_its_result(cluster, settings, node):
    async with backend(settings, node) as place:
        answers = await asyncio.gather(*(grade(place, info("test/length"), "x" * n) for n in range(1, 5)))
    assert [answer["grades"][0]["reward"] for answer in answers] == [1, 2, 3, 4]
    arrays = list((place.mailbox.folder / "arrays").glob("array-*"))
    assert len(arrays) == 1
    assert len(arrays[0].read_text().split()) == 4


async def test_a_restarted_service_finds_the_job_that_it_left_in_the_queue(cluster, settings, node):
    slow = info("test/slow", "surrogate")
    async with backend(settings, node) as place:
        before = asyncio.create_task(grade(place, slow, "3"))
        await until(lambda: list((place.mailbox.folder / "taken").iterdir()))
        before.cancel()
        await asyncio.wait([before])
    async with backend(settings, node) as successor:
        answer = await grade(successor, slow, "3")
    assert answer["grades"][0]["reward"] == 1
    assert len(list((successor.mailbox.folder / "arrays").glob("array-*"))) == 1


async def test_a_cancelled_job_leaves_the_queue(cluster, settings, node):
    async with backend(settings, node) as place:
        with contextlib.suppress(TimeoutError):
            async with place.session(info("test/slow", "surrogate")) as session:
                grading = asyncio.create_task(session.grade("test/slow", '{"n":1}', ["60"]))
                await until(lambda: list((place.mailbox.folder / "taken").iterdir()))
                grading.cancel()
                await asyncio.wait([grading])
                raise TimeoutError
        await until(lambda: not cluster.run("squeue", "-h", "-o", "%T").split())
    assert not list((place.mailbox.folder / "results").iterdir())


async def test_a_job_that_somebody_kills_in_slurm_is_a_lost_session(cluster, settings, node):
    impatient = settings.model_copy(update={"lost_seconds": 1.0})
    async with backend(impatient, node) as place:
        grading = asyncio.create_task(grade(place, info("test/slow", "surrogate"), "60"))
        await until(lambda: list((place.mailbox.folder / "taken").iterdir()))
        (task,) = cluster.run("squeue", "-h", "--array", "-o", "%F_%K").split()
        cluster.run("scancel", "--signal=KILL", "--full", task)
        with pytest.raises(SessionLost, match=r"ended without a result|sign of life"):
            await grading


async def test_an_order_that_slurm_refuses_is_said_in_its_words(cluster, settings, node):
    wrong = settings.model_copy(update={"partition": "nowhere"})
    async with backend(wrong, node) as place:
        with pytest.raises(SessionLost, match="partition"):
            await grade(place, info("test/length"), "a")
