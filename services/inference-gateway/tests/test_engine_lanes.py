"""Several adapters on one base in one engine: each row is its own adapter's, whatever else is in the batch."""

import pytest
import torch

from reflux_inference_gateway.engine.served import Weights
from reflux_inference_gateway.engine.types import GroupRequest
from reflux_model.lora import LoraSpec, initial_factors, merged
from reflux_model.training import logprobs

from .engine_harness import Harness, group

SPECS = {"red": LoraSpec(rank=4, groups=("attention", "mlp")), "blue": LoraSpec(rank=2, groups=("attention",))}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


def factors(config, spec, seed):
    drawn = initial_factors(config, spec, seed)
    noise = torch.Generator().manual_seed(seed + 100)
    return {name: 0.1 * torch.randn(tensor.shape, generator=noise) for name, tensor in drawn.items()}


class Shared(Harness):
    """An engine with adapters; `reference` has the merged weights of each version by model."""

    def __init__(self, folder, names=("red", "blue"), **options):
        super().__init__(folder, **options)
        self.reference = {("", 1): self.params}
        for number, name in enumerate(names):
            self.version(name, 1, seed=number)

    def version(self, name, version, seed):
        spec = SPECS[name]
        drawn = factors(self.config, spec, seed)
        self.reference[name, version] = merged(self.params, drawn, spec)
        self.core.swap(Weights(drawn, version, 10 * version, spec), model=name)

    def check(self, request, samples):
        for sample in samples:
            assert sample.spans[-1].end == len(sample.token_ids)
            for span in sample.spans:
                params = self.reference[request.model, span.version]
                (row,) = logprobs(params, self.config, [request.prompt_ids], [[sample.token_ids]])
                drawn = torch.tensor(sample.logprobs[span.start : span.end])
                assert torch.allclose(drawn, row[span.start : span.end], atol=1e-4)


def of(model, name, prompt=PROMPT, n=1, **sampling):
    plain = group(name, prompt, n, ignore_eos=True, **sampling)
    return GroupRequest(**{**plain.__dict__, "model": model})


def test_rows_of_several_adapters_in_one_batch_are_those_of_merged_weights(model_folder):
    engine = Shared(model_folder, max_rows=7)
    requests = [of(model, f"{model}{at}", PROMPT[at:], 3, seed=at) for at in range(4) for model in ("", "red", "blue")]
    for request, samples in zip(requests, engine.run(*requests), strict=True):
        engine.check(request, samples)
        alone = Shared(model_folder).run(request)[0]
        assert [one.token_ids for one in alone] == [one.token_ids for one in samples]
        for left, right in zip(alone, samples, strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_computed_prompts_are_shared_within_an_adapter_and_version_only(model_folder):
    engine = Shared(model_folder)
    counts = []
    for number, model in enumerate(("red", "blue", "", "red", "blue")):
        request = of(model, f"r{number}")
        engine.check(request, engine.run(request)[0])
        counts.append(engine.core.prompts.reused_tokens)
    assert counts == [0, 0, 0, 16, 32]
    engine.version("red", 2, seed=7)
    again, other = of("red", "again"), of("blue", "other")
    engine.check(again, engine.run(again)[0])
    assert engine.core.prompts.reused_tokens == 32, "what version 1 has computed is not read"
    engine.check(other, engine.run(other)[0])
    assert engine.core.prompts.reused_tokens == 48, "a swap of another adapter takes nothing away"


@pytest.mark.parametrize("kv", ["refresh", "keep"])
def test_a_swap_of_one_adapter_leaves_the_others_alone(model_folder, kv):
    figures = []
    engine = Shared(model_folder, kv=kv, settled=figures.append)
    red, blue, base = (of(model, f"{model}-long", n=2, max_tokens=30) for model in ("red", "blue", ""))
    for request in (red, blue, base):
        engine.core.submit(request)
    for _ in range(8):
        engine.core.step()
    before = engine.core.generated_tokens
    engine.version("red", 2, seed=7)
    engine.core.step()
    assert engine.core.generated_tokens >= before + 4, "all rows of the others decode in the step of the swap"
    while engine.core.step():
        pass
    answers = {one.request_id: [engine.samples[one.request_id][i] for i in range(2)] for one in (red, blue, base)}
    assert {span.version for one in answers[red.request_id] for span in one.spans} == {1, 2}
    for request in (blue, base):
        engine.check(request, answers[request.request_id])
        assert {span.version for one in answers[request.request_id] for span in one.spans} == {1}
    if kv == "refresh":
        engine.check(red, answers[red.request_id])
    assert engine.core.lanes.of("red").settled
    assert len(figures) == 1


def test_prompt_scores_and_whole_scores_are_the_adapters(model_folder):
    engine = Shared(model_folder)
    request = of("red", "scored", prompt_logprobs=0)
    (sample,) = engine.run(request)[0]
    (expected,) = logprobs(engine.reference["red", 1], engine.config, [PROMPT[:1]], [[PROMPT[1:]]])
    drawn = [scores[token].logprob for scores, token in zip(sample.prompt_scores, PROMPT[1:], strict=True)]
    assert drawn == pytest.approx(expected.tolist(), abs=1e-4)
    scored = engine.core.score(PROMPT, "red")
    assert scored.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert (scored.version, scored.epoch) == (1, 10)


def test_an_adapter_that_leaves_ends_its_own_requests_only(model_folder):
    engine = Shared(model_folder)
    red, blue = of("red", "red", max_tokens=20), of("blue", "blue", max_tokens=20)
    for request in (red, blue):
        engine.core.submit(request)
    for _ in range(3):
        engine.core.step()
    assert engine.core.close("red") == ["red"]
    assert "red" not in engine.core.lanes
    while engine.core.step():
        pass
    assert engine.samples["red"][0].finish_reason == "abort"
    engine.check(blue, [engine.samples["blue"][0]])
