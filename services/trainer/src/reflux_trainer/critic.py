"""The critic's values: asked for before a step is decided, and logged with it."""

from collections.abc import Sequence

from reflux_trainer.advantages import TokenRows
from reflux_trainer.parts import Parts
from reflux_trainer.queue.records import Group
from reflux_trainer.reference import asked_of, rows_of


async def critic_values(parts: Parts, groups: Sequence[Group]) -> TokenRows | None:
    """V before every token of the answers that a step trains on; None for a run without a critic."""
    if parts.config.rl.algorithm != "gae":
        return None
    return rows_of(groups, await parts.learner.values(asked_of(groups)))
