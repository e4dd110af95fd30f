"""How many bytes does a version take as a delta? AdamW at learning rate 1e-6 on SmolLM2-135M, in bfloat16.

The real learner's arithmetic (float32 weights and moments) on seeded tokens; after each step the weights are cast into
an arena beside their difference to the version before. The first step of AdamW changes every weight by the whole
learning rate, later ones by less: the figure is the median over all steps, each is printed. The last difference is
encoded once more, applied and compared.
"""

import argparse
import json
import random
import statistics
import sys
import time

import torch
from fleet import model_folder

from reflux_model.config import ModelConfig
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.delta.codec import decode, encode
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend

_GROUPS = 8
_TOKENS = 64
_PROMPT = 16


def batch(config: ModelConfig, seed: int) -> list[GroupData]:
    """Sequences of seeded tokens, their completions to be learned."""
    draw = random.Random(seed)
    vocabulary = min(config.vocab_size, 400)
    tokens = [[draw.randrange(5, vocabulary) for _ in range(_TOKENS)] for _ in range(_GROUPS)]
    return [GroupData(each[:_PROMPT], [CompletionData(token_ids=each[_PROMPT:])]) for each in tokens]


def check(base: memoryview, new: memoryview) -> None:
    """Applies the difference and compares every byte."""
    out, found = memoryview(bytearray(len(new))), memoryview(bytearray(len(new)))
    encoded = encode(base, new, out, base_fingerprint=1)
    assert encoded
    decode(out[: encoded.length], base, found, base_fingerprint=1)
    assert found == new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="auto", help="a folder, auto or tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with model_folder(options.model) as folder:
        learner = Learner.from_folder(folder, 0)
    layout = Layout.from_shapes({name: (tuple(each.shape), "bfloat16") for name, each in learner.params.items()})
    arenas = PublisherArenas(open_backend("shm"), layout, delta_share=0.5)

    def write(base: int | None) -> tuple[int, float]:
        staging = arenas.begin()
        weights = {name: each.detach().bfloat16().view(torch.uint16).numpy() for name, each in learner.params.items()}
        staging.write(weights, base=base)
        if base is not None:
            assert staging.delta, "the difference is too dense for a delta"
        return staging.generation, staging.delta.length / layout.parameter_bytes if staging.delta else 1.0

    base, _ = write(None)
    arenas.pin(base)
    ratios = []
    for step in range(options.steps):
        learner.forward_backward(batch(learner.config, step), LossSpec(name="cross_entropy"))
        learner.optim_step(StepSpec(learning_rate=options.learning_rate))
        begun = time.perf_counter()
        generation, ratio = write(base)
        ratios.append(ratio)
        print(
            f"step {step + 1}: {ratio:.4f} of the dense bytes, staged in {time.perf_counter() - begun:.2f} s",
            flush=True,
        )
        previous, base = base, generation
        if step == options.steps - 1:
            check(arenas.view(previous), arenas.view(generation))
        arenas.pin(generation)
    middle = statistics.median(ratios)
    print(json.dumps({"delta_bytes_ratio": round(middle, 4), "delta_first_step": round(ratios[0], 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
