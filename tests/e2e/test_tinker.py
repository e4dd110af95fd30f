"""The unmodified tinker SDK against the whole stack: real learner, broker, gateway and engine."""

import asyncio
import os
import signal

import pytest
from e2e_tinker import BASE, datum, train, with_sdk
from tinker import types

from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_client import connection

SEQUENCES = [[1, 9, 4, 9, 4, 9, 4, 9], [2, 6, 3, 6, 3, 6]]


async def test_the_sdk_trains_an_adapter_and_samples_with_its_weights(harness):
    async def use(service):
        training = await service.create_lora_training_client(base_model=BASE, rank=8, seed=3)
        data = [datum(tokens) for tokens in SEQUENCES]
        losses = [await train(training, data) for _ in range(25)]
        assert losses[-1] < losses[0] / 4, losses
        sampler = await training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([1, 9])
        greedy = types.SamplingParams(max_tokens=6, temperature=0)
        answer = await sampler.sample(prompt, 1, greedy, include_prompt_logprobs=True, topk_sample_logprobs=2)
        (sequence,) = answer.sequences
        assert list(sequence.tokens) == [4, 9, 4, 9, 4, 9]
        check = await training.forward([datum([1, 9, *sequence.tokens])], "cross_entropy")
        mine = list(check.loss_fn_outputs[0]["logprobs"].data)
        assert [*answer.prompt_logprobs[1:], *sequence.logprobs] == pytest.approx(mine, abs=1e-4)
        assert [row[0][0] for row in sequence.topk_logprobs] == list(sequence.tokens)
        # A group of one prompt, drawn at temperature 1: what the sampler says is what the learner recomputes.
        drawn = await asyncio.gather(*(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=5)) for _ in range(4)))
        data = [datum([1, 9, *each.sequences[0].tokens]) for each in drawn]
        again = await training.forward(data, "cross_entropy")
        for each, output in zip(drawn, again.loss_fn_outputs, strict=True):
            assert list(each.sequences[0].logprobs) == pytest.approx(list(output["logprobs"].data)[1:], abs=1e-4)
        base = await service.create_sampling_client(base_model=BASE)
        plain = await base.sample(prompt, 1, greedy)
        assert list(plain.sequences[0].tokens) != list(sequence.tokens), "the base answers as the adapter does"
        assert list((await sampler.sample(prompt, 1, greedy)).sequences[0].tokens) == list(sequence.tokens)
        assert training.get_tokenizer().decode([4, 9]) == "w4 w9"

    await with_sdk(harness.folder, use)


async def test_a_killed_trainer_and_a_killed_learner_change_no_number(harness):
    """Each is killed -9 in mid-step; losses and saved weights are those of the run that nobody disturbed."""

    async def kill_trainer():
        harness.kill(harness.record.pids["trainer"])

    async def kill_learner():
        os.kill(await _pid("learner"), signal.SIGKILL)

    async def use(service, kills):
        training = await service.create_lora_training_client(base_model=BASE, rank=4, seed=3)
        data, losses = [datum(tokens) for tokens in SEQUENCES], []
        for step in range(5):
            backward = training.forward_backward(data, "cross_entropy")
            update = training.optim_step(types.AdamParams(learning_rate=0.02))
            if step in kills:
                await kills[step]()
            losses.append((await backward).metrics["loss:sum"])
            await update
        return losses

    undisturbed = await with_sdk(harness.folder, lambda service: use(service, {}))
    disturbed = await with_sdk(harness.folder, lambda service: use(service, {1: kill_trainer, 3: kill_learner}))
    assert disturbed == undisturbed
    assert undisturbed[-1] < undisturbed[0]


@pytest.mark.slow
async def test_a_killed_replica_is_followed_by_one_that_draws_the_same(harness):
    async def use(service):
        training = await service.create_lora_training_client(base_model=BASE, rank=8, seed=3)
        for _ in range(3):
            await train(training, [datum(tokens) for tokens in SEQUENCES])
        sampler = await training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=40, seed=11)

        async def drawn():
            answers = await asyncio.gather(
                *(sampler.sample(types.ModelInput.from_ints([1, n]), 2, params) for n in range(8))
            )
            return [[list(sequence.tokens) for sequence in answer.sequences] for answer in answers]

        before = await drawn()
        under_way = asyncio.create_task(drawn())
        os.kill(await _pid("engine-0"), signal.SIGKILL)
        assert await under_way == before
        os.kill(await _pid("engine-0"), signal.SIGKILL)
        os.kill(await _pid("learner"), signal.SIGKILL)
        assert await drawn() == before

    await with_sdk(harness.folder, use)


async def _pid(role: str) -> int:
    async with connection.channel("scheduler") as channel:
        stub = SchedulerServiceStub(channel)
        for job in (await stub.ListJobs(scheduler_pb.ListJobsRequest())).jobs:
            if job.display_name.startswith("tinker-"):
                for member in job.members:
                    if member.role_id.endswith(f"/{role}/0") and member.pid:
                        return member.pid
    raise AssertionError(f"no {role} of a Tinker base runs")
