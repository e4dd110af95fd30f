"""Named figures of a step, as docs/metrics.md lists them. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_trainer.backlog import rewards_of
from reflux_trainer.consume import Batch
from reflux_trainer.publish import Sync
from reflux_trainer.queue.records import Group

OUTCOMES = ("scored", "invalid", "timeout", "infra_error", "cancelled")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by what the loop waited for."""

    step: float
    spent: dict[str, float]
    """Phase of `Waits` -> seconds."""
    compute: float
    """Seconds that the learner says it computed."""


def lag_counts(groups: Sequence[Group], version: int) -> Counter[int]:
    """Samples by lag: learner's version minus the oldest version of the sample's tokens."""
    return Counter(
        max(0, version - sample.oldest_version) for group in groups for sample in group.samples if sample.versions
    )


def step_figures(
    batch: Batch,
    version: int,
    forward: pb.ForwardBackwardResponse,
    optim: pb.OptimStepResponse,
    times: StepTimes,
    sync: Sync | None,
    depths: tuple[int, int],
) -> dict[str, float]:
    """Figures of one step; `version` is the learner's before it."""
    lags = lag_counts(batch.groups, version)
    return (
        _rewards(batch)
        | _learner(forward, optim)
        | _times(times, batch)
        | {
            "lag/mean": sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
            "lag/max": float(max(lags, default=0)),
            "sync_ms": 1000.0 * sync.seconds if sync else 0.0,
            "pause_ms": sync.pause_ms if sync else 0.0,
            "queue/prompts": float(depths[0]),
            "queue/groups": float(depths[1]),
        }
    )


def _rewards(batch: Batch) -> dict[str, float]:
    finished = batch.finished
    rewards = np.concatenate([rewards_of(group) for group in finished]) if finished else np.array([])
    known = rewards[~np.isnan(rewards)]
    closings = Counter(why for _, why in batch.dropped)
    outcomes = Counter(grade.outcome for group in finished for grade in group.grades)
    return {
        "reward/mean": float(known.mean()) if known.size else 0.0,
        "reward/std": float(known.std()) if known.size else 0.0,
        "reward/pass_rate": float((known >= 1.0 - 1e-9).mean()) if known.size else 0.0,
        "groups/trained": float(len(batch.groups)),
        "groups/filtered": float(closings["filtered"]),
        "groups/unknown": float(closings["unknown"]),
        "groups/dead": float(closings["dead"]),
        "tokens/generated": float(sum(len(sample.token_ids) for group in finished for sample in group.samples)),
    } | {f"outcomes/{name}": float(outcomes[name]) for name in OUTCOMES}


def _learner(forward: pb.ForwardBackwardResponse, optim: pb.OptimStepResponse) -> dict[str, float]:
    return {
        "loss": forward.loss,
        "grad_norm": optim.grad_norm,
        "tokens/trained": float(forward.tokens),
        "entropy": forward.entropy,
        "kl_sample_train": forward.kl_sample_train,
        "logprob_gap_max": forward.max_logprob_gap,
        "clip_fraction": forward.clip_fraction,
        "version": float(optim.version),
    }


def _times(times: StepTimes, batch: Batch) -> dict[str, float]:
    parts = {name: times.spent.get(name, 0.0) for name in ("wait_rollout", "train", "sync")}
    tokens = sum(len(sample.token_ids) for group in batch.finished for sample in group.samples)
    finished = max(1, len(batch.finished))
    return {f"time/{name}": seconds for name, seconds in parts.items()} | {
        "time/step": times.step,
        "time/other": max(0.0, times.step - sum(parts.values())),
        "time/generate": sum(group.generate_seconds for group in batch.finished) / finished,
        "time/verify": sum(group.verify_seconds for group in batch.finished) / finished,
        "trainer_idle": max(0.0, 1.0 - times.compute / times.step) if times.step else 0.0,
        "tokens_per_second": tokens / times.step if times.step else 0.0,
    }
