"""The supervised stage: right answers to the task's warm-up problems, through the learner's same primitives."""

import asyncio
import time
from dataclasses import replace

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_trainer import oplog
from reflux_trainer.parts import Parts
from reflux_trainer.problems import question
from reflux_trainer.queue.ledger import Cursor
from reflux_trainer.schedule import warmup_rate
from reflux_trainer.steps import StepLog, checkpoint_due, due

EVENT_EVERY_STEPS = 5


async def warm_up(parts: Parts, cursor: Cursor) -> Cursor:
    """Supervised steps from `cursor` to the last one; the next batch is built while the learner computes."""
    stage, started, checks = parts.config.warmup, time.monotonic(), StepLog(parts)
    following = _prefetch(parts, cursor.warmup_step)
    while cursor.warmup_step < stage.steps:
        await parts.control.gate(parts.waits)
        groups = await following
        following = _prefetch(parts, cursor.warmup_step + 1)
        await parts.checkpoints.settled()
        request = pb.ForwardBackwardRequest(
            op_id=cursor.op_id + 1,
            model_id=parts.run,
            groups=groups,
            loss=pb.LossConfig(name="cross_entropy", aggregation="token_mean"),
        )
        step = _optimizer_request(parts, cursor)
        after = replace(cursor, warmup_step=cursor.warmup_step + 1)
        cursor = await parts.ledger.log_step(after, [oplog.encode(request), oplog.encode(step)], [])
        forward = await parts.learner.forward_backward(request)
        optim = await parts.learner.optim_step(step)
        checks.check_applied(optim)
        if checkpoint_due(cursor.warmup_step, parts.config.checkpoint.every_steps, stage.steps):
            await parts.checkpoints.start(cursor, optim.version, 0)
        if due(cursor.warmup_step, EVENT_EVERY_STEPS, stage.steps) or cursor.warmup_step == stage.steps:
            await _write(parts, cursor, forward, optim, time.monotonic() - started)
    following.cancel()
    await parts.checkpoints.settled()
    return cursor


def _prefetch(parts: Parts, step: int) -> asyncio.Task[list[pb.PromptGroup]]:
    return asyncio.create_task(asyncio.to_thread(_examples, parts, step), name="warm-up batch")


def _examples(parts: Parts, step: int) -> list[pb.PromptGroup]:
    size, codec = parts.config.warmup.batch_size, parts.codec
    questions = [question(parts.task, "warmup", step * size + each) for each in range(size)]
    return [
        pb.PromptGroup(
            prompt_token_ids=codec.prompt_ids(asked),
            completions=[pb.Completion(token_ids=codec.answer_ids(asked), advantage=1.0)],
        )
        for asked in questions
    ]


def _optimizer_request(parts: Parts, cursor: Cursor) -> pb.OptimStepRequest:
    return pb.OptimStepRequest(
        op_id=cursor.op_id + 2,
        model_id=parts.run,
        learning_rate=warmup_rate(parts.config.warmup, cursor.warmup_step),
        beta1=0.9,
        beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )


async def _write(
    parts: Parts, cursor: Cursor, forward: pb.ForwardBackwardResponse, optim: pb.OptimStepResponse, seconds: float
) -> None:
    stage = parts.config.warmup
    figures = {
        "loss": forward.loss,
        "grad_norm": optim.grad_norm,
        "learning_rate": warmup_rate(stage, cursor.warmup_step - 1),
        "entropy": forward.entropy,
        "tokens/trained": float(forward.tokens),
        "version": float(optim.version),
        "time/step": seconds / max(1, cursor.warmup_step),
    }
    await parts.journal.write("warmup", cursor.warmup_step, stage.steps, figures)
