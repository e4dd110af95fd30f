"""A learner that takes two steps of a run and writes both arenas after each.

Prints the peak of its resident memory in bytes.

learner_peak.py RUN_FILE_AS_JSON MODEL_FOLDER PROMPT_TOKENS
"""

import json
import re
import sys
from pathlib import Path

import torch

from reflux_model.lora import LoraSpec
from reflux_runs.config import RunConfig
from reflux_runs.load import load_document
from reflux_trainer.learner.adapters import merged_weights
from reflux_trainer.learner.casting import caster
from reflux_trainer.learner.core import AdapterJob, Learner
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.numerics import COMPUTE_DTYPES, Numerics
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec
from reflux_trainer.learner.publish import WEIGHT_DTYPES
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend


def run(learner: Learner, config: RunConfig, prompt_tokens: int) -> None:
    rl, model, dtype = config.rl, config.model, config.fleet.weight_dtype
    answer = CompletionData([5] * rl.max_tokens, [-1.0] * rl.max_tokens)
    groups = [GroupData([7] * prompt_tokens, [answer] * rl.samples_per_group)] * rl.groups_per_step
    adapter = None
    if model.lora_rank:
        adapter = LoraAdapter.fresh(learner.config, LoraSpec(rank=model.lora_rank, groups=("attention", "mlp")), 0)
    layout = Layout.from_shapes({name: (tuple(tensor.shape), dtype) for name, tensor in learner.params.items()})
    arenas = PublisherArenas(open_backend("shm"), layout)
    for _ in range(2):
        if adapter is None:
            learner.forward_backward(groups, LossSpec(name="ppo"))
        else:
            learner.adapters_forward_backward([AdapterJob(adapter, groups, LossSpec(name="ppo"))])
        (adapter or learner).optim_step(StepSpec(learning_rate=1e-4))
        weights = {name: tensor.detach() for name, tensor in merged_weights(learner.params, adapter).items()}
        with arenas.begin() as staging:
            staging.write(weights, caster(WEIGHT_DTYPES[dtype]))


def main() -> None:
    torch.set_num_threads(1)
    config = load_document(json.loads(sys.argv[1]))
    numerics = Numerics(dtype=COMPUTE_DTYPES[config.model.compute_dtype], recompute=config.model.gradient_checkpointing)
    learner = Learner.from_folder(Path(sys.argv[2]), 0, numerics)
    run(learner, config, int(sys.argv[3]))
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak) * 1024)


if __name__ == "__main__":
    main()
