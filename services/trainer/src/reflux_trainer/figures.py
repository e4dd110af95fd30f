"""Named figures of a step, as docs/metrics.md lists them. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_trainer.backlog import rewards_of
from reflux_trainer.consume import Batch
from reflux_trainer.curriculum import PassRates
from reflux_trainer.publish import Sync
from reflux_trainer.queue.groups import Arrival
from reflux_trainer.queue.records import Group

_SOLVED = 1.0 - 1e-9
OUTCOMES = ("scored", "invalid", "timeout", "infra_error", "cancelled")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by what the loop waited for."""

    step: float
    spent: dict[str, float]
    """Phase of `Waits` -> seconds."""
    compute: float
    """Seconds that the learner says it computed."""
    at: float
    """Unix time at which the batch was formed."""


_PASS_RATE = "curriculum/pass_rate/"


def curriculum_figures(rates: PassRates, finished: Sequence[Group]) -> dict[str, float]:
    """Takes in the groups of a step, and tells pass rate and share of each kind of problem."""
    for group in finished:
        if (known := _known(group)).size:
            rates.observe(group.stratum, float((known >= _SOLVED).mean()))
    asked = Counter(group.stratum for group in finished)
    shares = {f"curriculum/share/{name}": count / asked.total() for name, count in asked.items()}
    return {f"{_PASS_RATE}{name}": rate for name, rate in rates.rates.items()} | shares


def known_rates(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Pass rates as the newest event told them: a trainer that was restarted goes on with them."""
    for event in reversed(events):
        found = {
            name.removeprefix(_PASS_RATE): value
            for name, value in event["metrics"].items()
            if name.startswith(_PASS_RATE)
        }
        if found:
            return found
    return {}


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
        | _times(times, batch, forward.tokens)
        | _ages(batch.groups, times.at)
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
        "reward/pass_rate": float((known >= _SOLVED).mean()) if known.size else 0.0,
        "groups/trained": float(len(batch.groups)),
        "groups/filtered": float(closings["filtered"]),
        "groups/unknown": float(closings["unknown"]),
        "groups/dead": float(closings["dead"]),
        "groups/stale": float(closings["stale"]),
        "tokens/generated": float(_tokens(finished)),
        "tokens/discarded": float(_tokens([group for group, why in batch.dropped if why == "stale"])),
        **{f"outcomes/{name}": float(outcomes[name]) for name in OUTCOMES},
        **_pass_at(finished),
    }


def _tokens(groups: Sequence[Arrival]) -> int:
    return sum(len(sample.token_ids) for group in groups if isinstance(group, Group) for sample in group.samples)


def _pass_at(groups: Sequence[Group]) -> dict[str, float]:
    """Share of prompts that k answers solve, for k = 2, 4, ...: the unbiased estimate of arXiv 2107.03374, section 2.1,
    1 - C(n - c, k) / C(n, k) with c of n known answers right, averaged over prompts with at least k known answers.
    """
    counts = [(len(known), int((known >= _SOLVED).sum())) for known in map(_known, groups)]
    figures, k = {}, 2
    while rows := [(n, c) for n, c in counts if n >= k]:
        figures[f"reward/pass_at_{k}"] = sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in rows) / len(rows)
        k *= 2
    return figures


def _known(group: Group) -> np.ndarray:
    rewards = rewards_of(group)
    return rewards[~np.isnan(rewards)]


def _ages(groups: Sequence[Group], now: float) -> dict[str, float]:
    """How long ago the prompts of a batch were issued, and where the time went: the four parts sum up to it."""
    if not groups:
        return {}
    parts = {
        "queue": [group.claimed_at - group.issued_at for group in groups],
        "generate": [group.generate_seconds for group in groups],
        "train": [now - group.emitted_at for group in groups],
    }
    ages = [now - group.issued_at for group in groups]
    means = {name: max(0.0, sum(values) / len(groups)) for name, values in parts.items()}
    age = sum(ages) / len(groups)
    return {
        "age_at_train": age,
        **{f"age/{name}": seconds for name, seconds in means.items()},
        "age/verify": max(0.0, age - sum(means.values())),
    }


def _learner(forward: pb.ForwardBackwardResponse, optim: pb.OptimStepResponse) -> dict[str, float]:
    return {
        "loss": forward.loss,
        "grad_norm": optim.grad_norm,
        "tokens/trained": float(forward.tokens),
        "entropy": forward.entropy,
        "kl_sample_train": forward.kl_sample_train,
        "kl_reference": forward.kl_reference,
        "logprob_gap_max": forward.max_logprob_gap,
        "clip_fraction": forward.clip_fraction,
        "version": float(optim.version),
    }


def critic_figures(forward: pb.ForwardBackwardResponse) -> dict[str, float]:
    """How the critic of a step did."""
    return {"critic/loss": forward.value_loss, "critic/explained_variance": forward.explained_variance}


def _times(times: StepTimes, batch: Batch, trained_tokens: int) -> dict[str, float]:
    parts = {name: times.spent.get(name, 0.0) for name in ("wait_rollout", "train", "sync")}
    tokens = sum(len(sample.token_ids) for group in batch.finished for sample in group.samples)
    finished = max(1, len(batch.finished))
    return (
        {f"time/{name}": seconds for name, seconds in parts.items()}
        | {
            "time/step": times.step,
            "time/other": max(0.0, times.step - sum(parts.values())),
            "time/generate": sum(group.generate_seconds for group in batch.finished) / finished,
            "time/verify": sum(group.verify_seconds for group in batch.finished) / finished,
            "trainer_idle": max(0.0, 1.0 - times.compute / times.step) if times.step else 0.0,
            "tokens_per_second": tokens / times.step if times.step else 0.0,
            "trainer/compute_seconds": times.compute,
            "tokens_per_compute_second": trained_tokens / times.compute if times.compute else 0.0,
        }
        | {
            f"trainer_idle/{cause}": seconds / times.step
            for cause, seconds in _idle(times, batch).items()
            if times.step
        }
    )


def _idle(times: StepTimes, batch: Batch) -> dict[str, float]:
    """Seconds in which the loop stood still, by cause."""
    waited = times.spent.get("wait_rollout", 0.0)
    verify = min(waited, batch.verify_wait_seconds)
    return {
        "rollout": waited - verify,
        "verify": verify,
        "sync": times.spent.get("sync", 0.0),
        "checkpoint": times.spent.get("checkpoint", 0.0),
    }
