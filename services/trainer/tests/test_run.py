"""Whole runs in one process: real trainer, real queue, real rollout worker; peers that speak the real protocols."""

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
from redis.asyncio import from_url
from trainer_world import Run, config, create, events_of, finish, short, until

from reflux.trainer.v1 import run_pb2
from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux_kit.errors import reason_of
from reflux_runs.translate import to_changes
from reflux_trainer import checkpointing, processes
from reflux_trainer.queue.keys import RunKeys


async def test_a_run_goes_through_its_stages_and_leaves_its_records(world):
    async with world.trainer() as stub:
        run = await create(stub, config())
        assert run.state in (Run.STATE_PENDING, Run.STATE_WARMING_UP)
        events = await finish(world, stub, run)
    ended = events[-1].run
    assert (ended.state, ended.step, ended.message) == (Run.STATE_SUCCEEDED, 4, "")
    stages = [event.progress.stage for event in events if event.progress.stage]
    assert stages.count("rl") == 4
    assert {"warmup", "evaluation"} <= set(stages)
    assert world.learner.done == ["create", *range(1, 2 * 7 + 1)]
    assert [role.role for role in world.scheduler.roles] == ["learner", "engine", "rollout"]
    folder = Path(ended.folder)
    assert {"config.toml", "split.json", "events.jsonl", "samples.jsonl", "summary.json", "model"} <= {
        path.name for path in folder.iterdir()
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"] == {
        "issued": 0, "emitted": 0, "trained": 12, "filtered": 0, "unknown": 0, "dead": 0, "violations": [],
    }  # fmt: skip
    assert summary["steps"] == 4
    assert summary["reward_after_warmup"] == 0.0
    assert summary["evaluations"]["final"]["held"]["surrogate_prompts"] == 2
    assert summary["peak_rss_bytes"] > 0
    assert sum(summary["lag_histogram"].values()) == 4 * 3 * 2
    assert [made.cursor.step for made in world.checkpoints.committed] == [0, 0, 2, 4]
    assert [made.cursor.warmup_step for made in world.checkpoints.committed] == [2, 3, 3, 3]
    async with from_url(world.url) as client:
        trimmed = int(await client.hget(RunKeys(short(run)).cursor, "trimmed_op_id"))
    assert trimmed == world.checkpoints.committed[-2].cursor.op_id  # the older one can be replayed
    assert world.scheduler.saved == ["jobs/j1"] * len(world.checkpoints.committed)
    assert world.scheduler.cancelled.is_set()


async def test_a_run_without_engines_of_its_own_takes_replicas_that_are_there(world):
    async with world.trainer() as stub:
        run = await create(stub, config(fleet={"engines": 0}))
        events = await finish(world, stub, run)
    assert events[-1].run.state == Run.STATE_SUCCEEDED
    assert [role.role for role in world.scheduler.roles] == ["learner", "rollout"]


async def test_watching_goes_on_where_it_broke(world):
    async with world.trainer() as stub:
        run = await create(stub, config())
        events = await finish(world, stub, run)
        rest = await events_of(stub, run.name, events[5].resume_token)
        assert [event.resume_token for event in rest] == [event.resume_token for event in events[6:]]


async def test_the_same_request_gives_the_same_run(world):
    async with world.trainer() as stub:
        request = pb.CreateRunRequest(request_id=str(uuid4()), config=config())
        first, second = (await stub.CreateRun(request)).run, (await stub.CreateRun(request)).run
        assert first.name == second.name
        listed = (await stub.ListRuns(pb.ListRunsRequest(page_size=1))).runs
        assert listed[0].name == first.name
        await stub.CancelRun(pb.CancelRunRequest(name=first.name))


async def test_lag_zero_publishes_before_it_rolls_out(world):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"max_lag": 0}))
        events = await finish(world, stub, run)
    lags = [m.value for event in events for m in event.progress.metrics if m.name == "lag/max"]
    assert lags == [0.0] * 4


async def test_one_answer_per_prompt_is_enough_where_rewards_are_compared_over_the_step(world):
    async with world.trainer() as stub:
        rl = {"algorithm": "reinforce_pp", "samples_per_group": 1, "groups_per_step": 4}
        run = await create(stub, config(rl=rl))
        events = await finish(world, stub, run)
    assert events[-1].run.state == run_pb2.Run.STATE_SUCCEEDED
    assert all(len(group.completions) == 1 for batch in world.learner.batches for group in batch.groups)


async def test_every_second_version_asks_learner_and_replicas_to_score_one_prompt(world):
    async with world.trainer() as stub:
        run = await create(stub, config(fleet={"probe_every": 2}))
        await finish(world, stub, run)
    asked = world.learner.probes
    assert len(asked) >= 4
    assert all(asked[0] == prompt and len(prompt) > 1 for prompt in asked[::2])
    assert not any(asked[1::2])


async def test_a_restarted_trainer_takes_the_run_up_by_itself(world):
    async with AsyncExitStack() as stack:
        async with world.trainer() as stub:
            run = await create(stub, config(rl={"steps": 8}))
            await stack.enter_async_context(world.worker(short(run)))
            await world.announce(stub, short(run))
            await until(stub, run.name, lambda event: event.progress.stage == "rl" and event.progress.step >= 2)
        async with world.trainer() as stub:
            await world.announce(stub, short(run))
            ended = (await events_of(stub, run.name))[-1].run
    assert (ended.state, ended.step, ended.attempt) == (Run.STATE_SUCCEEDED, 8, 2)
    assert world.learner.done == ["create", *range(1, 2 * 11 + 1)]
    summary = json.loads((Path(ended.folder) / "summary.json").read_text())
    assert summary["ledger"]["trained"] == 24
    assert summary["ledger"]["violations"] == []


async def test_a_run_that_redis_forgot_resumes_from_its_checkpoint_without_repeating_prompts(world):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"steps": 8}))
        async with world.worker(short(run)):
            await world.announce(stub, short(run))
            await until(stub, run.name, lambda event: event.progress.stage == "rl" and event.progress.step >= 3)
            await stub.CancelRun(pb.CancelRunRequest(name=run.name))
    async with from_url(world.url) as client:
        await client.delete(*[key async for key in client.scan_iter(match=f"{{{short(run)}}}:*")])
    world.checkpoints.damaged.add(world.checkpoints.committed[-1].name)  # and the newest checkpoint is damaged
    cut = world.checkpoints.committed[-2].cursor
    world.learner.model_id = ""  # a new process
    world.learner.done.clear()
    async with world.trainer() as stub:
        resumed = (await stub.CreateRun(pb.CreateRunRequest(resume_run=short(run)))).run
        assert resumed.attempt == 2
        ended = (await finish(world, stub, resumed))[-1].run
    assert (ended.state, ended.step) == (Run.STATE_SUCCEEDED, 8)
    assert world.learner.done[0] == f"load {cut.op_id}"
    assert world.learner.done[1:] == list(range(cut.op_id + 1, 2 * 11 + 1))
    summary = json.loads((Path(ended.folder) / "summary.json").read_text())
    assert summary["ledger"]["trained"] == 24 - cut.step * 3


async def test_a_fork_goes_on_from_a_checkpoint_of_another_run_with_changed_settings(world):
    async with world.trainer() as stub:
        source = await create(stub, config(rl={"steps": 4}))
        await finish(world, stub, source)
        origin = next(made for made in world.checkpoints.committed if made.cursor.step == 2)
        world.learner.model_id = ""  # the fork's own process
        world.learner.done.clear()
        changes = to_changes({"name": "child", "rl": {"steps": 5, "learning_rate": 1e-3, "groups_per_step": 2}})
        request = pb.ForkRunRequest(request_id=str(uuid4()), name=source.name, checkpoint=origin.name, changes=changes)
        forked = (await stub.ForkRun(request)).run
        assert (await stub.ForkRun(request)).run.name == forked.name, "a repeated request makes no second run"
        ended = (await finish(world, stub, forked))[-1].run
    assert (ended.state, ended.step, ended.forked_from) == (Run.STATE_SUCCEEDED, 5, origin.name)
    assert ended.name.startswith("runs/child-")
    assert (ended.config.rl.groups_per_step, ended.config.rl.samples_per_group) == (2, 2)
    assert world.learner.done[0] == f"load {origin.cursor.op_id}"
    own = [made.cursor for made in world.checkpoints.committed if made.run == short(ended)]
    assert own[0].op_id == origin.cursor.op_id, "it does not depend on the source's retention"
    summary = json.loads((Path(ended.folder) / "summary.json").read_text())
    assert (summary["ledger"]["trained"], summary["ledger"]["violations"]) == (2 * 3, [])


@pytest.mark.parametrize(
    ("checkpoint", "changes", "says"),
    [
        ("", {"seed": 7}, "a fork keeps seed"),
        ("", {"rl": {"steps": 2}}, "rl.steps"),
        ("checkpoints/another/1", {}, "is no checkpoint of"),
        ("checkpoints/{run}/99", {}, "has no checkpoint"),
    ],
)
async def test_a_fork_that_cannot_be_is_refused_with_the_reason(world, checkpoint, changes, says):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"steps": 2}))
        await finish(world, stub, run)
        request = pb.ForkRunRequest(
            request_id=str(uuid4()),
            name=run.name,
            checkpoint=checkpoint.format(run=short(run)),
            changes=to_changes(changes),
        )
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await stub.ForkRun(request)


async def test_another_dataset_is_refused_on_resume(world):
    async with world.trainer() as stub:
        run = await create(stub, config())
        await finish(world, stub, run)
        async with from_url(world.url) as client:
            await client.delete(*[key async for key in client.scan_iter(match=f"{{{short(run)}}}:*")])
        resumed = await create(stub, config(seed=5), resume_run=short(run))
        ended = (await events_of(stub, resumed.name))[-1].run
    assert ended.state == Run.STATE_FAILED
    assert "another task, seed or split" in ended.message


async def test_a_failed_run_resumes_but_not_with_other_counts(world):
    world.learner.publish_failures = 2
    async with world.trainer() as stub:
        run = await create(stub, config())
        failed = (await finish(world, stub, run))[-1].run
        assert failed.state == Run.STATE_FAILED
        assert "replica r0 refused: checksum mismatch" in failed.message
        with pytest.raises(grpc.aio.AioRpcError, match=r"rl\.groups_per_step"):
            await create(stub, config(rl={"groups_per_step": 5}), resume_run=short(run))
        world.scheduler.cancelled.clear()
        resumed = (await stub.ResumeRun(pb.ResumeRunRequest(name=run.name))).run
        assert resumed.attempt == 2
        ended = (await finish(world, stub, run))[-1].run
    assert (ended.state, ended.message) == (Run.STATE_SUCCEEDED, "")


async def test_pause_holds_the_loop_and_resume_lets_it_go_on(world):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"steps": 3000}))
        async with world.worker(short(run)):
            await world.announce(stub, short(run))
            await until(stub, run.name, lambda event: event.progress.stage == "rl")
            paused = (await stub.PauseRun(pb.PauseRunRequest(name=run.name))).run
            assert paused.state == Run.STATE_PAUSED
            resumed = (await stub.ResumeRun(pb.ResumeRunRequest(name=run.name))).run
            assert resumed.state == Run.STATE_RUNNING
            await until(stub, run.name, lambda event: event.progress.step > paused.step + 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ResumeRun(pb.ResumeRunRequest(name=run.name))
            assert reason_of(caught.value) == "WRONG_STATE"
            cancelled = (await stub.CancelRun(pb.CancelRunRequest(name=run.name))).run
    assert cancelled.state == Run.STATE_CANCELLED
    assert world.scheduler.cancelled.is_set()


async def test_a_run_whose_workers_never_come_fails_with_phase_party_and_age(world):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"no_progress_seconds": 1.0}))
        await world.announce(stub, short(run))
        moved = time.monotonic()
        ended = (await events_of(stub, run.name))[-1].run
    assert ended.state == Run.STATE_FAILED
    assert re.search(
        r"wait_rollout: waiting for the rollout workers to finish prompt 0 \(6 are out\) since \d+ s", ended.message
    )
    assert time.monotonic() - moved < 1.0 + 30.0


async def test_a_learner_that_never_answers_ends_the_run_with_phase_party_and_age(world):
    world.learner.hold = asyncio.Event()
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"no_progress_seconds": 2.0}))
        await world.announce(stub, short(run))
        moved = time.monotonic()
        ended = (await events_of(stub, run.name))[-1].run
        world.learner.hold.set()
    assert ended.state == Run.STATE_FAILED
    assert re.search(r"limit 2 s\); train: waiting for the learner's ForwardBackward since \d+ s", ended.message)
    assert time.monotonic() - moved < 2.0 + 30.0


async def test_a_scheduler_that_never_answers_ends_the_run_too(world):
    world.scheduler.place = asyncio.Event()
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"no_progress_seconds": 2.0}))
        ended = (await events_of(stub, run.name))[-1].run
        world.scheduler.place.set()
    assert ended.state == Run.STATE_FAILED
    assert re.search(r"start: waiting for the scheduler to place the run's job since \d+ s", ended.message)


async def test_held_out_answers_without_a_grade_are_asked_for_again(world):
    world.sandbox.ungraded = 5
    async with world.trainer() as stub:
        run = await create(stub, config())
        ended = (await finish(world, stub, run))[-1].run
    assert ended.state == Run.STATE_SUCCEEDED
    held = json.loads((Path(ended.folder) / "summary.json").read_text())["evaluations"]["after_warmup"]["held"]
    assert (held["prompts"], held["unknown"]) == (4, 0)


async def test_an_evaluation_without_grades_fails_the_run_and_is_no_reward_of_zero(world):
    world.sandbox.ungraded = 1000
    async with world.trainer() as stub:
        run = await create(stub, config())
        ended = (await finish(world, stub, run))[-1].run
    assert ended.state == Run.STATE_FAILED
    assert "4 of 4 answers of the held-out set held have no grade" in ended.message
    assert "no child is ready" in ended.message
    assert json.loads((Path(ended.folder) / "summary.json").read_text())["reward_after_warmup"] is None


async def test_a_job_that_ends_takes_the_run_with_it_and_says_why(world):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"steps": 50}))
        async with world.worker(short(run)):
            await world.announce(stub, short(run))
            await until(stub, run.name, lambda event: event.progress.stage == "rl")
            world.scheduler.end("engine/0 ended 6 times within 10 minutes")
            ended = (await events_of(stub, run.name))[-1].run
    assert ended.state == Run.STATE_FAILED
    assert "engine/0 ended 6 times within 10 minutes" in ended.message


async def test_a_learner_that_never_comes_is_named(world):
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"no_progress_seconds": 2.0}))
        ended = (await events_of(stub, run.name))[-1].run
    assert ended.state == Run.STATE_FAILED
    assert "learner to announce itself" in ended.message


async def test_checkpoints_that_fail_are_reported_and_training_goes_on(world):
    world.checkpoints.away = True
    async with world.trainer() as stub:
        run = await create(stub, config())
        ended = (await finish(world, stub, run))[-1].run
    assert ended.state == Run.STATE_SUCCEEDED
    assert world.checkpoints.committed == []
    assert ended.message == "4 checkpoints failed, the last one at step 4: the object store is away"
    summary = json.loads((Path(ended.folder) / "summary.json").read_text())
    assert len(summary["checkpoint_failures"]) == 4
    lines = [json.loads(line) for line in (Path(ended.folder) / "events.jsonl").read_text().splitlines()]
    failures = [text for line in lines for text in line.get("detail", {}).get("checkpoint_failures", [])]
    assert "step 2: the object store is away" in failures


async def test_a_scheduler_that_does_not_hear_of_checkpoints_holds_up_nothing(world, caplog):
    world.scheduler.save_code = grpc.StatusCode.INTERNAL
    async with world.trainer() as stub:
        run = await create(stub, config())
        ended = (await finish(world, stub, run))[-1].run
    assert (ended.state, ended.message) == (Run.STATE_SUCCEEDED, "")
    assert len(world.scheduler.saved) == len(world.checkpoints.committed) == 4
    assert sum("does not hear of checkpoints of jobs/j1" in each.message for each in caplog.records) == 1


async def test_training_goes_on_while_the_scheduler_is_told_of_a_checkpoint(world, monkeypatch):
    monkeypatch.setattr(processes, "_SAVED_SECONDS", 600.0)
    world.scheduler.save_hold = asyncio.Event()
    async with world.trainer() as stub:
        run = await create(stub, config())
        async with world.worker(short(run)):
            await world.announce(stub, short(run))
            await until(stub, run.name, lambda event: event.progress.stage == "rl" and event.progress.step == 4)
            assert len(world.scheduler.saved) >= 2  # no answer yet: neither the loop nor a checkpoint waited for one
            world.scheduler.save_hold.set()
            assert (await events_of(stub, run.name))[-1].run.state == Run.STATE_SUCCEEDED


async def test_a_long_operation_log_is_told_to_people(world, monkeypatch):
    monkeypatch.setattr(checkpointing, "MAX_KEPT_OPERATIONS", 10)
    async with world.trainer() as stub:
        run = await create(stub, config(checkpoint={"every_steps": 0}))
        ended = (await finish(world, stub, run))[-1].run
    assert ended.state == Run.STATE_SUCCEEDED
    assert "the operation log holds 10 operations" in ended.message


async def test_a_step_that_was_decided_before_a_crash_has_an_event(world):
    async with AsyncExitStack() as stack:
        async with world.trainer() as stub:
            run = await create(stub, config(rl={"steps": 6}))
            await stack.enter_async_context(world.worker(short(run)))
            await world.announce(stub, short(run))
            await until(stub, run.name, lambda event: event.progress.stage == "rl" and event.progress.step >= 2)
        path = world.folder / short(run) / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        last = max(line["step"] for line in lines if line["stage"] == "rl")
        lost = (("rl", last), ("evaluation", 0))
        kept = [line for line in lines if (line["stage"], line["step"]) not in lost]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        async with world.trainer() as stub:
            await world.announce(stub, short(run))
            ended = (await events_of(stub, run.name))[-1].run
    assert ended.state == Run.STATE_SUCCEEDED
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted({line["step"] for line in lines if line["stage"] == "rl"}) == [1, 2, 3, 4, 5, 6]
    summary = json.loads((path.parent / "summary.json").read_text())
    assert summary["groups"]["trained"] == 18
    assert summary["reward_after_warmup"] is None  # nobody can evaluate those weights any more


async def test_a_checkpoint_that_is_committed_already_is_no_failure(world, caplog):
    world.checkpoints.taken = True
    async with world.trainer() as stub:
        run = await create(stub, config())
        assert (await finish(world, stub, run))[-1].run.state == Run.STATE_SUCCEEDED
    assert not [each.message for each in caplog.records if each.levelname == "ERROR"]


async def test_bad_requests_get_a_status_with_a_reason(world):
    calls = [
        ("CreateRun", pb.CreateRunRequest()),
        ("CreateRun", pb.CreateRunRequest(request_id="x", config=run_pb2.RunConfig())),
        ("CreateRun", pb.CreateRunRequest(request_id=str(uuid4()), config=run_pb2.RunConfig(name="Not A Name"))),
        ("CreateRun", pb.CreateRunRequest(resume_run="nobody-knows-it")),
        ("GetRun", pb.GetRunRequest()),
        ("GetRun", pb.GetRunRequest(name="runs/none")),
        ("ListRuns", pb.ListRunsRequest(page_token="x")),
        ("PauseRun", pb.PauseRunRequest(name="runs/none")),
        ("ResumeRun", pb.ResumeRunRequest(name="runs/../x")),
        ("CancelRun", pb.CancelRunRequest(name="runs/none")),
        ("RegisterLearner", pb.RegisterLearnerRequest()),
        ("RegisterLearner", pb.RegisterLearnerRequest(run="r", address="nowhere")),
    ]
    async with world.trainer() as stub:
        for method, request in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(stub, method)(request)
            assert reason_of(caught.value) in ("INVALID_REQUEST", "NOT_FOUND"), method
        for request in (pb.WatchRunRequest(), pb.WatchRunRequest(name="runs/a", resume_token="?")):
            with pytest.raises(grpc.aio.AioRpcError):
                [event async for event in stub.WatchRun(request)]
