"""The order of operations: exactly once, whatever a caller repeats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_trainer.learner.journal import KEPT_ANSWERS, Journal, OutOfOrderError
from reflux_trainer.learner.ops import BatchFigures, StepFigures


def _step(version: int, norm: float = 1.0) -> StepFigures:
    return StepFigures(norm, version, True, 0.25)


def test_a_repeated_operation_gets_its_first_answer() -> None:
    journal = Journal()
    assert journal.recall(1, "optim_step") is None
    journal.record(1, "optim_step", _step(1))
    assert journal.recall(1, "optim_step") == _step(1)
    assert journal.recall(2, "optim_step") is None


def test_a_gap_a_forgotten_answer_and_another_kind_are_refused() -> None:
    journal = Journal()
    with pytest.raises(OutOfOrderError, match="send 1 first"):
        journal.recall(2, "optim_step")
    for op_id in range(1, KEPT_ANSWERS + 2):
        journal.record(op_id, "optim_step", _step(op_id))
    with pytest.raises(OutOfOrderError, match="no longer kept"):
        journal.recall(1, "optim_step")
    assert journal.recall(2, "optim_step") == _step(2)
    with pytest.raises(OutOfOrderError, match="was optim_step, not forward_backward"):
        journal.recall(2, "forward_backward")


@given(
    norms=st.lists(st.floats(allow_nan=False), max_size=5),
    loss=st.floats(allow_nan=False),
)
def test_a_journal_survives_storage_exactly(norms: list[float], loss: float) -> None:
    journal = Journal()
    journal.record(1, "forward_backward", BatchFigures(loss, 3, 0.1, -0.2, 0.3, 0.0, 0.5))
    for version, norm in enumerate(norms, 1):
        journal.record(version + 1, "optim_step", _step(version, norm))
    read = Journal.load(journal.dump())
    assert read.last == journal.last
    for op_id in range(1, journal.last + 1):
        kind = "forward_backward" if op_id == 1 else "optim_step"
        assert read.recall(op_id, kind) == journal.recall(op_id, kind)
