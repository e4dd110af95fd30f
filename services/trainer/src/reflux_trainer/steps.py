"""Beside the loop: what a step logs before it happens, what it checks, and what it tells afterwards."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.telemetry import span
from reflux_trainer import oplog
from reflux_trainer.consume import Batch
from reflux_trainer.figures import StepTimes, critic_figures, curriculum_figures, lag_counts, step_figures
from reflux_trainer.metrics import LAG, REWARD, STEP, STEP_SECONDS
from reflux_trainer.parts import Parts
from reflux_trainer.problems import question
from reflux_trainer.queue.ledger import Cursor
from reflux_trainer.queue.records import Group
from reflux_trainer.schedule import critic_rate, rl_rate

MAX_REFUSED_STEPS = 5
TRANSCRIPT_EVERY_STEPS = 10


class LagBroken(AssertionError):
    """A sample is older than the bound allows: a bug in window, queue or gateway."""


class NotFinite(RuntimeError):
    """Loss or gradient was not finite several times in a row."""


def due(step: int, every: int, last: int) -> bool:
    """True for every `every`-th step up to `last`; 0 means never."""
    return every > 0 and step % every == 0 and 0 < step <= last


def checkpoint_due(step: int, every: int, last: int) -> bool:
    """True for every `every`-th step and for the last one, which is what the stage was for; 0 means never."""
    return due(step, every, last) or (every > 0 and step == last)


def optimizer_request(parts: Parts, cursor: Cursor, num_batches: int) -> pb.OptimStepRequest:
    """The optimizer step of step `cursor.step` behind its batches; the first one forgets the moments of warm-up."""
    return pb.OptimStepRequest(
        op_id=cursor.op_id + num_batches + 1,
        model_id=parts.run,
        learning_rate=rl_rate(parts.config.rl, cursor.step),
        critic_learning_rate=critic_rate(parts.config.rl, cursor.step),
        beta1=0.9,
        beta2=0.99,
        max_grad_norm=parts.config.rl.max_grad_norm,
        reset_optimizer=cursor.step == 0,
    )


async def decide(
    parts: Parts,
    cursor: Cursor,
    batch: Batch,
    requests: Sequence[pb.ForwardBackwardRequest],
    step: pb.OptimStepRequest,
) -> Cursor:
    """Logs the step; from here on it happens exactly once, whoever dies."""
    after = replace(
        cursor,
        step=cursor.step + 1,
        low_water_index=batch.low_water_index,
        next_prompt_index=parts.issuer.next_index,
    )
    operations = [oplog.encode(operation) for operation in (*requests, step)]
    return await parts.ledger.log_step(after, operations, batch.groups)


@contextmanager
def optimizer_span(parts: Parts, cursor: Cursor, batch: Batch) -> Iterator[None]:
    """The step's own trace, linked to the traces of all prompts that it trains on."""
    links = [group.traceparent for group in batch.groups]
    with span("optimizer step", links=links, reflux__run=parts.run, reflux__step=cursor.step) as current:
        yield
        current.set_attribute("reflux.version", parts.learner.version)


class StepLog:
    """Checks of each step, and its figures."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._refused = 0
        self._told_first_batch = False
        self._version = parts.learner.version
        self._started = 0.0
        self.begin()

    def begin(self) -> None:
        """Starts the clock of a step."""
        self._parts.waits.drain_spent()
        self._started = time.monotonic()

    @property
    def epoch(self) -> int:
        """Broker epoch of the last committed version."""
        return self._parts.publisher.last.epoch if self._parts.publisher.last else 0

    def check_lag(self, batch: Batch) -> None:
        """Raises LagBroken when a sample is older than max_lag versions."""
        self._version, bound = self._parts.learner.version, self._parts.config.rl.max_lag
        counts = lag_counts(batch.groups, self._version)
        for lag, count in counts.items():
            for _ in range(count):
                LAG.labels(run=self._parts.run).observe(lag)
        if max(counts, default=0) > bound:
            raise LagBroken(f"a sample is {max(counts)} versions old at version {self._version}, the bound is {bound}")

    def check_applied(self, optim: pb.OptimStepResponse) -> None:
        """Raises NotFinite after several refused steps in a row; the weights of a refused step stay as they were."""
        self._refused = 0 if optim.applied else self._refused + 1
        if self._refused >= MAX_REFUSED_STEPS:
            raise NotFinite(
                f"the gradient was not finite {self._refused} times in a row (norm {optim.grad_norm}); the last good "
                f"checkpoint is {(self._parts.checkpoints.committed or ['none'])[-1]}; a smaller rl.learning_rate helps"
            )

    async def write_missing(self, cursor: Cursor) -> None:
        """A short event for the last decided step when the trainer died before it wrote the step's own."""
        parts = self._parts
        if not cursor.step or any(e["stage"] == "rl" and e["step"] == cursor.step for e in parts.journal.events()):
            return
        figures = {"version": float(parts.learner.version), "groups/trained": float(parts.config.rl.groups_per_step)}
        await parts.journal.write("rl", cursor.step, parts.config.rl.steps, figures, {"recovered": True})

    async def write(
        self,
        cursor: Cursor,
        batch: Batch,
        advantages: Sequence[np.ndarray],
        forward: pb.ForwardBackwardResponse,
        optim: pb.OptimStepResponse,
    ) -> None:
        """Event, spans, transcripts and metrics of the step behind `cursor`."""
        parts, seconds = self._parts, time.monotonic() - self._started
        compute = parts.learner.drain_forward_seconds() + forward.seconds + optim.seconds
        times = StepTimes(seconds, parts.waits.drain_spent(), compute, batch.formed_at)
        self._adapt(batch, seconds - times.spent.get("wait_rollout", 0.0))
        figures = step_figures(
            batch, self._version, forward, optim, times, parts.publisher.last, await parts.queue.depths()
        )
        if not self._told_first_batch:
            self._told_first_batch = True
            figures |= parts.milestones.figures()
        figures |= await parts.late.figures()
        figures |= {"window/open": float(parts.window.open), "window/wanted": float(parts.window.wanted)}
        if parts.config.rl.algorithm == "gae":
            figures |= critic_figures(forward)
        if parts.pass_rates is not None:
            figures |= curriculum_figures(parts.pass_rates, batch.finished)
        figures["learning_rate"] = rl_rate(parts.config.rl, cursor.step - 1)
        detail: dict[str, Any] = {"lag": dict(lag_counts(batch.groups, self._version)), "applied": optim.applied}
        if failures := parts.checkpoints.drain_failures():
            detail["checkpoint_failures"] = failures
        if parts.publisher.last is not None:
            sync = parts.publisher.last
            detail |= {"replicas": sync.replicas, "sync": {"version": sync.version, "at": sync.at}}
        await parts.journal.write("rl", cursor.step, parts.config.rl.steps, figures, detail)
        await parts.checkpoints.check_log(cursor.op_id)
        self._spans(cursor, batch.groups, advantages)
        STEP.labels(run=parts.run).set(cursor.step)
        REWARD.labels(run=parts.run).set(figures["reward/mean"])
        STEP_SECONDS.labels(run=parts.run).observe(seconds)
        if cursor.step % TRANSCRIPT_EVERY_STEPS == 1:
            self._transcripts(cursor, batch.groups[0])

    def _adapt(self, batch: Batch, busy_seconds: float) -> None:
        if self._parts.in_flight is not None:
            self._parts.in_flight.observe(
                [group.emitted_at - group.issued_at for group in batch.finished], busy_seconds
            )
            self._parts.window.wanted = self._parts.in_flight.wanted

    def _spans(self, cursor: Cursor, groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> None:
        run = self._parts.run
        for group, values in zip(groups, advantages, strict=True):
            with span("train", parent=group.traceparent, reflux__run=run, reflux__prompt=group.index) as current:
                current.set_attribute("reflux.step", cursor.step)
                current.set_attribute("reflux.advantages", [round(float(value), 5) for value in values])

    def _transcripts(self, cursor: Cursor, group: Group) -> None:
        built = question(self._parts.task, "train", group.problem)
        for number, (sample, grade) in list(enumerate(zip(group.samples, group.grades, strict=True)))[:2]:
            self._parts.journal.sample(
                {
                    "stage": "rl",
                    "step": cursor.step,
                    "sample": f"{self._parts.run}/{group.index}/{number}",
                    "prompt": self._parts.codec.prompt_text(built),
                    "answer": self._parts.codec.answer_text(sample.token_ids),
                    "truth": built.answer_text,
                    "reward": grade.reward,
                    "outcome": grade.outcome,
                    "peaks": peaks(built.truth),
                }
            )


def peaks(truth: dict[str, object]) -> dict[str, object]:
    """The measured pattern in a problem's payload; empty lists when the task has none."""
    return {"two_theta": truth.get("two_theta_degrees", []), "intensity": truth.get("intensity", [])}
