"""Tenants: whose runs are whose, quotas under concurrent creates and restarts, tokens that open nothing else."""

import asyncio
from uuid import uuid4

import aiohttp
import grpc
import pytest
from trainer_world import Run, config

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_kit import auth
from reflux_kit.channel import open_channel
from reflux_kit.errors import StartupError
from reflux_kit.settings import ServiceSettings
from reflux_trainer import supervisor
from reflux_trainer.tenancy import load_tenancy

SECRET = "the stack's own secret"
QUOTAS = "[tenants.physics]\nmax_runs = 2\nmax_engines = 5\n[tenants.chemistry]\n"


@pytest.fixture
def quotas(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(QUOTAS)
    return {"stack_secret": SECRET, "tenants_file": str(path)}


def called_by(world, tenant):
    settings = ServiceSettings(token=auth.mint(SECRET, tenant or "operator", tenant=tenant), stack_secret="")
    return open_channel(world.grpc, settings)


async def create(channel, request_id=None, **sections):
    request = pb.CreateRunRequest(request_id=request_id or str(uuid4()), config=config(**sections))
    return (await TrainerServiceStub(channel).CreateRun(request)).run


async def test_what_another_tenant_owns_does_not_exist_on_any_method(world, quotas):
    async with world.trainer(**quotas), called_by(world, "physics") as own, called_by(world, "chemistry") as other:
        run = await create(own)
        assert run.tenant == "physics"
        stub, name = TrainerServiceStub(other), run.name
        for call in (
            stub.GetRun(pb.GetRunRequest(name=name)),
            stub.PauseRun(pb.PauseRunRequest(name=name)),
            stub.ResumeRun(pb.ResumeRunRequest(name=name)),
            stub.ForkRun(pb.ForkRunRequest(name=name, request_id=str(uuid4()))),
            stub.CancelRun(pb.CancelRunRequest(name=name)),
            stub.CreateRun(pb.CreateRunRequest(resume_run=name.removeprefix("runs/"))),
            anext(aiter(stub.WatchRun(pb.WatchRunRequest(name=name)))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert list((await stub.ListRuns(pb.ListRunsRequest())).runs) == []
        async with called_by(world, "") as operator:
            listed = (await TrainerServiceStub(operator).ListRuns(pb.ListRunsRequest())).runs
            assert [each.tenant for each in listed] == ["physics"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RegisterLearner(pb.RegisterLearnerRequest(run=name.removeprefix("runs/"), address="a:1"))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_http_routes_keep_tenants_apart_and_take_no_token_of_a_run(world, quotas):
    async with world.trainer(**quotas), called_by(world, "physics") as own, aiohttp.ClientSession() as http:
        run = (await create(own)).name
        routes = [
            ("GET", ""),
            ("GET", "/events"),
            *(("POST", f"/{verb}") for verb in ("pause", "resume", "cancel", "fork")),
        ]
        for method, route in routes:
            headers = {"Authorization": f"Bearer {auth.mint(SECRET, 'chemistry', tenant='chemistry')}"}
            async with http.request(method, f"{world.http}/v1/{run}{route}", headers=headers, json={}) as answer:
                assert (route, answer.status) == (route, 404)
        for token, status in (
            (auth.mint(SECRET, "learner", run.removeprefix("runs/")), 403),
            (auth.mint(SECRET, "physics", tenant="physics"), 200),
            (auth.mint(SECRET, "operator"), 200),
        ):
            async with http.get(f"{world.http}/v1/runs", headers={"Authorization": f"Bearer {token}"}) as answer:
                assert answer.status == status


async def test_a_quota_holds_under_concurrent_creates_and_after_a_restart(world, quotas):
    async with world.trainer(**quotas), called_by(world, "physics") as channel:
        wanted = [create(channel, name=f"r{number}") for number in range(6)]
        made = await asyncio.gather(*wanted, return_exceptions=True)
        runs = [each for each in made if not isinstance(each, BaseException)]
        refused = [each for each in made if isinstance(each, BaseException)]
        assert len(runs) == 2
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert runs[0].name.removeprefix("runs/") in refused[0].details()
        async with called_by(world, "") as operator:
            await create(operator, name="unbound")
    async with world.trainer(**quotas), called_by(world, "physics") as channel:
        stub = TrainerServiceStub(channel)
        assert {each.name for each in (await stub.ListRuns(pb.ListRunsRequest())).runs} == {run.name for run in runs}
        with pytest.raises(grpc.aio.AioRpcError):
            await create(channel)
        await stub.CancelRun(pb.CancelRunRequest(name=runs[0].name))
        assert (await create(channel)).state == Run.STATE_PENDING


async def test_engines_are_counted_over_a_tenants_runs(world, quotas):
    async with world.trainer(**quotas), called_by(world, "physics") as channel:
        await create(channel, fleet={"engines": 3})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(channel, fleet={"engines": 3})
        assert "5 engines" in refused.value.details()
        await create(channel, fleet={"engines": 2})


async def test_a_repeated_request_is_the_same_run_for_its_tenant_and_another_one_for_others(world, quotas):
    request_id = str(uuid4())
    async with world.trainer(**quotas), called_by(world, "physics") as own, called_by(world, "chemistry") as other:
        first, again = await create(own, request_id), await create(own, request_id)
        foreign = await create(other, request_id)
        assert first.name == again.name != foreign.name
        await create(own)  # the quota is full now
        assert (await create(own, request_id)).name == first.name


async def test_an_id_that_collides_with_another_tenants_run_gives_nothing_away(world, quotas, monkeypatch):
    monkeypatch.setattr(supervisor, "new_run_id", lambda config, request_id, tenant="": "collides-0")
    async with world.trainer(**quotas), called_by(world, "physics") as own, called_by(world, "chemistry") as other:
        await create(own)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(other)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert list((await TrainerServiceStub(other).ListRuns(pb.ListRunsRequest())).runs) == []


async def test_resumes_at_once_stay_within_the_quota(world, quotas):
    async with world.trainer(**quotas), called_by(world, "physics") as channel:
        stub, ended = TrainerServiceStub(channel), []
        for number in range(4):
            run = await create(channel, name=f"e{number}")
            await stub.CancelRun(pb.CancelRunRequest(name=run.name))
            ended.append(run.name)
        calls = [stub.ResumeRun(pb.ResumeRunRequest(name=name)) for name in ended]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(not isinstance(each, BaseException) for each in found) == 2


async def test_a_tenant_without_a_quota_starts_nothing(world, quotas):
    async with world.trainer(**quotas), called_by(world, "biology") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(channel)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "TENANTS_FILE" in refused.value.details()


def test_a_tenants_token_is_nobody_elses():
    token = auth.mint(SECRET, "physics", tenant="physics")
    with pytest.raises(Exception, match="tenant's"):
        auth.verify(SECRET, token)
    assert auth.verify(SECRET, token, tenants=True).tenant == "physics"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.physics]\nmax_rums = 1", "max_rums"),
        ("[tenants.physics]\nmax_runs = -1", "max_runs"),
        ("tenants = 3", "tenants"),
        ("[tenants", "not TOML"),
    ],
)
def test_a_broken_file_names_the_mistake(tmp_path, text, words):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match=words):
        load_tenancy(str(path))
    with pytest.raises(StartupError, match="cannot be read"):
        load_tenancy(str(tmp_path / "none.toml"))
