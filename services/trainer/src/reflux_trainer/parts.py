"""Everything that the stages of one run work with, put together once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux_runs.config import RunConfig
from reflux_tasks.task import Task
from reflux_trainer.checkpointing import Checkpoints
from reflux_trainer.codec import Codec
from reflux_trainer.consume import BatchFormer
from reflux_trainer.control import Control
from reflux_trainer.curriculum import PassRates
from reflux_trainer.evaluate import Evaluator
from reflux_trainer.in_flight import InFlight
from reflux_trainer.issue import Issuer
from reflux_trainer.journal import Journal
from reflux_trainer.late.rewards import LateRewards
from reflux_trainer.learner_client import LearnerClient
from reflux_trainer.milestones import Milestones
from reflux_trainer.publish import Publisher
from reflux_trainer.queue.groups import GroupQueue
from reflux_trainer.queue.ledger import Ledger
from reflux_trainer.watchdog import Waits
from reflux_trainer.window import Window


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One run's machinery; the stages own the cursor."""

    run: str
    config: RunConfig
    folder: Path
    task: Task[Any]
    codec: Codec
    ledger: Ledger
    queue: GroupQueue
    learner: LearnerClient
    publisher: Publisher
    checkpoints: Checkpoints
    evaluator: Evaluator
    journal: Journal
    waits: Waits
    control: Control
    window: Window
    in_flight: InFlight | None
    """None: as many prompts are open as the bound on lag allows."""
    pass_rates: PassRates | None
    """None: problems are asked one after the other."""
    issuer: Issuer
    batches: BatchFormer
    milestones: Milestones
    late: LateRewards
