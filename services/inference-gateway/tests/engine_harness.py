"""An engine core that keeps what it delivers, and what its answers are checked against."""

import torch

from reflux_inference_gateway.engine.core import EngineCore
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.types import FinishedSample, GroupRequest, Sampling, TokenDelta
from reflux_model.folder import load_folder
from reflux_model.training import logprobs


class Harness:
    """An engine core whose events are kept by request."""

    def __init__(
        self,
        folder,
        *,
        max_rows=16,
        kv="refresh",
        decode=None,
        prefill_tokens=64,
        blocks=64,
        kv_tokens=0,
        sharpen=8.0,
        **core,
    ):
        self.config, params = load_folder(folder)
        self.params = sharpened(params, sharpen)
        options = CoreOptions(
            max_rows=max_rows,
            max_model_len=96,
            kv_tokens=kv_tokens or 96 * max_rows,
            prefill_tokens_per_step=prefill_tokens,
            prefix_blocks=blocks,
            kv_after_swap=kv,
        )
        self.samples: dict[str, dict[int, FinishedSample]] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.core = EngineCore(
            self.config, Weights(self.params, 1, 10), options, self.deliver, eos_ids=[1], decode=decode, **core
        )

    def deliver(self, request_id, event):
        if isinstance(event, TokenDelta):
            self.deltas.setdefault(request_id, []).append(event)
        else:
            assert event.index not in self.samples.setdefault(request_id, {})
            self.samples[request_id][event.index] = event

    def run(self, *requests):
        for request in requests:
            self.core.submit(request)
        while self.core.step():
            pass
        return [[self.samples[r.request_id][i] for i in range(r.num_samples)] for r in requests]


def sharpened(params, factor):
    # A random model is nearly uniform; a sharper one makes wrong keys and values visible in the log-probs.
    return {name: value * factor if value.dim() > 1 else value for name, value in params.items()}


def group(name, prompt, n=1, salt="", **sampling):
    fields = {"max_tokens": 12, "seed": 7} | sampling
    return GroupRequest(
        request_id=name, prompt_ids=tuple(prompt), num_samples=n, sampling=Sampling(**fields), cache_salt=salt
    )


def check_spans(engine, one, samples, params_by_version):
    tokens = [sample.token_ids for sample in samples]
    by_version = {
        version: logprobs(params, engine.config, [one.prompt_ids], [tokens])
        for version, params in params_by_version.items()
    }
    for index, sample in enumerate(samples):
        for span in sample.spans:
            expected = by_version[span.version][index][span.start : span.end]
            assert torch.allclose(torch.tensor(sample.logprobs[span.start : span.end]), expected, atol=1e-4)
