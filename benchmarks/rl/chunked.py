"""What do log-probs and entropies cost without the logits of all tokens being there at once, forward and backward?

The rival multiplies out all logits in one piece and lets autograd keep what it needs. Each side's memory is the growth
of a fresh process's resident set above its inputs; times are interleaved in one process. Figures: chunked / naive, and
the largest difference of log-probs, entropies and (relative to the largest) gradients.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_model.scoring import TokenScores, chunked_scores

Scorer = Callable[[Tensor, Tensor, Tensor], TokenScores]


def naive(hidden_TE: Tensor, weight_VE: Tensor, targets_T: Tensor) -> TokenScores:
    """All logits at once."""
    logprobs_TV = torch.log_softmax(torch.nn.functional.linear(hidden_TE, weight_VE).float(), -1)
    detached = logprobs_TV.detach()
    entropies_T = -(detached.exp() * detached).sum(-1)
    return TokenScores(logprobs_TV.gather(-1, targets_T[:, None])[:, 0], entropies_T)


SCORERS: dict[str, Scorer] = {"chunked": chunked_scores, "naive": naive}


@dataclass(frozen=True)
class Inputs:
    """Hidden states, head and targets; the slopes stand for a loss's."""

    hidden_TE: Tensor
    weight_VE: Tensor
    targets_T: Tensor
    slopes_T: Tensor

    @classmethod
    def drawn(cls, tokens: int, vocabulary: int, width: int) -> "Inputs":
        generator = torch.Generator().manual_seed(1)
        return cls(
            torch.randn(tokens, width, generator=generator).requires_grad_(),
            (0.05 * torch.randn(vocabulary, width, generator=generator)).requires_grad_(),
            torch.randint(vocabulary, (tokens,), generator=generator),
            torch.randn(tokens, generator=generator),
        )

    def run(self, scorer: Scorer) -> tuple[TokenScores, list[Tensor]]:
        """Forward and backward; the scores and both gradients."""
        self.hidden_TE.grad = self.weight_VE.grad = None
        scores = scorer(self.hidden_TE, self.weight_VE, self.targets_T)
        (scores.logprobs_T * self.slopes_T).sum().backward()
        assert self.hidden_TE.grad is not None
        assert self.weight_VE.grad is not None
        return scores, [self.hidden_TE.grad, self.weight_VE.grad]


def peak_mib(name: str, sizes: list[str]) -> float:
    """Memory of one pass in a process of its own, in MiB."""
    command = [sys.executable, __file__, *sizes, "--memory", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)


def own_peak_mib(inputs: Inputs, scorer: Scorer) -> float:
    """Growth of this process's largest resident set over one pass."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs.run(scorer)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def errors(inputs: Inputs) -> float:
    """Largest difference of the two, over scores and gradients."""
    ours, our_gradients = inputs.run(chunked_scores)
    theirs, gradients = inputs.run(naive)
    pairs = [(ours.logprobs_T, theirs.logprobs_T), (ours.entropies_T, theirs.entropies_T)]
    differences = [float((a.detach() - b.detach()).abs().max()) for a, b in pairs]
    relative = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(our_gradients, gradients, strict=True)]
    print(
        "largest differences: log-prob {:.2e}, entropy {:.2e}, gradients {:.2e} {:.2e}".format(*differences, *relative)
    )
    return max(*differences, *relative)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", choices=SCORERS, help="only print this side's memory in MiB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = Inputs.drawn(options.tokens, options.vocabulary, options.width)
    if options.memory:
        print(own_peak_mib(inputs, SCORERS[options.memory]))
        return 0
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "width")]
    memory = {name: peak_mib(name, sizes) for name in SCORERS}
    error = errors(inputs)
    seconds: dict[str, list[float]] = {name: [] for name in SCORERS}
    for _ in range(options.rounds):
        for name, scorer in SCORERS.items():
            started = time.perf_counter()
            inputs.run(scorer)
            seconds[name].append(time.perf_counter() - started)
    for name, values in seconds.items():
        spread = f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"
        print(f"{name:8} {memory[name]:8.0f} MiB above its inputs, {spread}")
    ratio = statistics.median(a / b for a, b in zip(seconds["chunked"], seconds["naive"], strict=True))
    figures = {
        "chunked_logprob_memory_ratio": round(memory["chunked"] / memory["naive"], 4),
        "chunked_logprob_time_ratio": round(ratio, 3),
        "chunked_logprob_max_err": error,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
