"""The loop: form a batch, log it, train on it, publish the new version while the next batch is being rolled out."""

from reflux_trainer.advantages import training_batch
from reflux_trainer.critic import critic_values
from reflux_trainer.parts import Parts
from reflux_trainer.queue.ledger import Cursor
from reflux_trainer.reference import reference_logprobs
from reflux_trainer.steps import StepLog, checkpoint_due, decide, due, optimizer_request, optimizer_span


async def train(parts: Parts, cursor: Cursor) -> Cursor:
    """Reinforcement learning from `cursor` to the last step; every error leaves as an exception."""
    rl, log = parts.config.rl, StepLog(parts)
    await log.write_missing(cursor)
    while cursor.step < rl.steps:
        await parts.control.gate(parts.waits)
        await parts.issuer.fill()
        if rl.max_lag == 0:
            await parts.publisher.settled()
        batch = await parts.batches.form(parts.learner.version)
        parts.milestones.mark("rollout")
        log.check_lag(batch)
        await parts.checkpoints.settled()

        reference = await reference_logprobs(parts, batch.groups)
        values = await critic_values(parts, batch.groups)
        request, advantages = training_batch(cursor.op_id + 1, parts.run, batch.groups, rl, reference, values)
        late = await parts.late.operations(cursor, parts.learner.version, batch)
        step = optimizer_request(parts, cursor, num_batches=1 + len(late))
        await parts.late.trained(request.op_id, batch, advantages)
        cursor = await decide(parts, cursor, batch, [request, *late], step)
        with optimizer_span(parts, cursor, batch):
            forward = await parts.learner.forward_backward(request)
            for corrections in late:
                await parts.learner.forward_backward(corrections)
            await parts.publisher.settled()
            optim = await parts.learner.optim_step(step)
        log.check_applied(optim)

        async def committed(version: int, trained: int = len(batch.groups)) -> None:
            parts.issuer.version = version
            parts.window.released(trained)
            if parts.control.open:
                await parts.issuer.fill()

        parts.publisher.start(committed)
        if checkpoint_due(cursor.step, parts.config.checkpoint.every_steps, rl.steps):
            await parts.checkpoints.start(cursor, optim.version, log.epoch)
        await log.write(cursor, batch, advantages, forward, optim)
        if due(cursor.step, parts.config.evaluation.every_steps, rl.steps - 1):
            await parts.publisher.settled()
            await parts.evaluator.intermediate(cursor.step, optim.version)
        log.begin()
    await parts.publisher.settled()
    await parts.checkpoints.finished()
    await parts.late.finished()
    return cursor
