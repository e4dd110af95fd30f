"""The unmodified tinker SDK against the API: training, sampling, checkpoints, errors."""

import asyncio

import numpy as np
import pytest
import tinker
from tinker import types
from tinker_world import KEY, datum, train

SEVEN = [1, 7, 7, 7, 7, 7]


async def test_a_supervised_loss_falls_and_samples_come_from_the_saved_weights(tinker_world):
    async def use(service):
        training = await service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
        losses = [(await train(training, [datum(SEVEN)] * 2)).metrics["loss:sum"] for _ in range(30)]
        assert losses[0] == pytest.approx(2 * 5 * np.log(16), rel=1e-4)
        assert losses[-1] < losses[0] / 5
        sampler = await training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=4, temperature=0)
        answer = await sampler.sample(types.ModelInput.from_ints([1, 2, 7]), 3, params)
        assert [list(each.tokens) for each in answer.sequences] == [[7, 7, 7, 7]] * 3
        assert answer.sequences[0].stop_reason == "length"
        # The learner recomputes what the sampler reported.
        check = await training.forward([datum([7, 7, 7, 7, 7])], "cross_entropy")
        mine = check.loss_fn_outputs[0]["logprobs"].data
        assert list(answer.sequences[0].logprobs) == pytest.approx(list(mine), abs=1e-4)
        base = await service.create_sampling_client(base_model="tiny")
        plain = await base.sample(types.ModelInput.from_ints([7]), 1, types.SamplingParams(max_tokens=2, seed=3))
        assert list(plain.sequences[0].logprobs) == pytest.approx([-np.log(16)] * 2, rel=1e-4)

    await tinker_world.with_sdk(use)


async def test_alternatives_and_prompt_log_probs_reach_the_client(tinker_world):
    async def use(service):
        sampler = await service.create_sampling_client(base_model="tiny")
        prompt = types.ModelInput.from_ints([1, 2, 3])
        answer = await sampler.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=3, stop=[5]),
            True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
        )
        uniform = -np.log(16)
        assert answer.prompt_logprobs[0] is None
        assert answer.prompt_logprobs[1:] == pytest.approx([uniform, uniform], rel=1e-4)
        assert [row if row is None else len(row) for row in answer.topk_prompt_logprobs] == [None, 2, 2]
        assert [len(row) for row in answer.sequences[0].topk_logprobs] == [3] * len(answer.sequences[0].tokens)
        last = await sampler.compute_logprobs(prompt, prompt_logprobs_last_n=1)
        assert last[:2] == [None, None]
        assert last[2] == pytest.approx(uniform, rel=1e-4)

    await tinker_world.with_sdk(use)


async def test_equal_prompts_that_come_together_are_one_group(tinker_world):
    async def use(service):
        sampler = await service.create_sampling_client(base_model="tiny")
        params, prompt = types.SamplingParams(max_tokens=6), types.ModelInput.from_ints([4, 5])
        answers = await asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(8)))
        assert len({tuple(answer.sequences[0].tokens) for answer in answers}) == 8, "equal draws"
        assert max(tinker_world.gateway.groups) >= 2
        assert sum(tinker_world.gateway.groups) == 8
        seeded = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=s)) for s in (1, 1, 2)]
        one, same, other = [tuple((await answer).sequences[0].tokens) for answer in seeded]
        assert one == same != other

    await tinker_world.with_sdk(use)


async def test_weights_and_optimizer_come_back_bit_for_bit_or_without_moments(tinker_world):
    async def use(service):
        training = await service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
        for _ in range(3):
            await train(training, [datum(SEVEN)])
        saved = await training.save_state("three")
        await train(training, [datum(SEVEN)])
        straight = (await train(training, [datum(SEVEN)])).metrics["loss:sum"]
        again = await service.create_training_client_from_state_with_optimizer(saved.path)
        await train(again, [datum(SEVEN)])
        assert (await train(again, [datum(SEVEN)])).metrics["loss:sum"] == straight
        fresh = await service.create_training_client_from_state(saved.path)
        await train(fresh, [datum(SEVEN)])
        assert (await train(fresh, [datum(SEVEN)])).metrics["loss:sum"] != straight
        steps = {name: adapter.steps for name, adapter in tinker_world.learner.adapters.items()}
        assert sorted(steps.values()) == [2, 5, 5]
        named = await training.save_weights_for_sampler("five")
        sampler = await service.create_sampling_client(model_path=named.path)
        assert sampler.get_base_model() == "tiny"
        rest = tinker.RestClient(base_url=tinker_world.http, api_key=KEY)
        runs = await rest.list_training_runs()
        assert runs.cursor.total_count == 3
        assert {run.base_model for run in runs.training_runs} == {"tiny"}
        listed = await rest.list_user_checkpoints()
        assert [each.tinker_path for each in listed.checkpoints] == [named.path, saved.path]
        info = await rest.get_weights_info_by_tinker_path(saved.path)
        assert (info.base_model, info.lora_rank) == ("tiny", 8)
        await rest.delete_checkpoint(training.model_id, "weights/three")
        assert [each.tinker_path for each in (await rest.list_user_checkpoints()).checkpoints] == [named.path]
        with pytest.raises(tinker.NotFoundError):
            await service.create_training_client_from_state(saved.path)

    await tinker_world.with_sdk(use)


async def test_snapshots_keep_their_weights_and_inflight_samplers_follow(tinker_world):
    async def use(service):
        training = await service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
        prompt, params = types.ModelInput.from_ints([7]), types.SamplingParams(max_tokens=1, temperature=0)

        async def drawn(sampler):
            return (await sampler.sample(prompt, 1, params)).sequences[0]

        old = await training.save_weights_and_get_sampling_client()
        following = await training.save_weights_and_get_sampling_client(kind="inflight")
        before = (await drawn(old)).logprobs[0]
        assert (await drawn(following)).logprobs[0] == before
        for _ in range(5):
            await train(training, [datum(SEVEN)])
        await training.save_weights_and_get_sampling_client(kind="inflight")
        new = await training.save_weights_and_get_sampling_client()
        assert (await drawn(following)).logprobs[0] > before
        assert (await drawn(new)).logprobs[0] == (await drawn(following)).logprobs[0]
        assert (await drawn(old)).logprobs[0] == before, "a snapshot changed"

    await tinker_world.with_sdk(use)


async def test_errors_tell_whose_fault_it_is(tinker_world):
    async def use(service):
        training = await service.create_lora_training_client(base_model="tiny", rank=8)
        with pytest.raises(tinker.RequestFailedError) as unknown:
            await training.forward_backward([datum(SEVEN)], "stable_reinforce")
        assert unknown.value.category is types.RequestErrorCategory.User
        assert "cross_entropy" in str(unknown.value)
        with pytest.raises(tinker.RequestFailedError, match="context of 64"):
            await training.forward_backward([datum([1] * 80)], "cross_entropy")
        short = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [3]})
        with pytest.raises(tinker.RequestFailedError, match="2 input tokens and 1 target_tokens"):
            await training.forward_backward([short], "cross_entropy")
        # A refused operation takes its number and nothing else with it.
        assert (await train(training, [datum(SEVEN)])).metrics["loss:sum"] > 0
        with pytest.raises(tinker.RequestFailedError, match="larger than the model"):
            await service.create_lora_training_client(base_model="tiny", rank=100)
        with pytest.raises(tinker.BadRequestError, match="not one of tiny"):
            await service.create_lora_training_client(base_model="huge")

    await tinker_world.with_sdk(use)
