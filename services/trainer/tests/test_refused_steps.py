"""Steps that the learner refuses because loss or gradient was not finite: a few are borne, a row of them is not."""

import math
from collections import deque
from typing import Any, cast

import pytest

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_trainer.parts import Parts
from reflux_trainer.steps import MAX_REFUSED_STEPS, NotFinite, StepLog


class _Learner:
    version = 3


class _Waits:
    def drain_spent(self) -> dict[str, float]:
        return {}


class _Checkpoints:
    def __init__(self, *names: str) -> None:
        self.committed = deque(names)


class _Parts:
    def __init__(self, *names: str) -> None:
        self.learner, self.waits, self.checkpoints = _Learner(), _Waits(), _Checkpoints(*names)


def steps_of(parts: _Parts) -> StepLog:
    return StepLog(cast(Parts, cast(Any, parts)))


GOOD = pb.OptimStepResponse(applied=True, grad_norm=1.0)
BAD = pb.OptimStepResponse(applied=False, grad_norm=math.nan)


def test_refused_steps_with_good_ones_between_them_end_nothing() -> None:
    steps = steps_of(_Parts("checkpoints/run/1"))
    for _ in range(3):
        for _ in range(MAX_REFUSED_STEPS - 1):
            steps.check_applied(BAD)
        steps.check_applied(GOOD)


@pytest.mark.parametrize(
    ("names", "told"),
    [(("checkpoints/run/1", "checkpoints/run/2"), "checkpoint is checkpoints/run/2;"), ((), "checkpoint is none;")],
)
def test_a_row_of_refused_steps_ends_the_run_and_names_the_last_good_checkpoint(
    names: tuple[str, ...], told: str
) -> None:
    steps = steps_of(_Parts(*names))
    for _ in range(MAX_REFUSED_STEPS - 1):
        steps.check_applied(BAD)
    with pytest.raises(NotFinite, match=f"{MAX_REFUSED_STEPS} times in a row") as caught:
        steps.check_applied(BAD)
    assert told in str(caught.value)
