"""Saving and loading: a resumed learner goes on bit for bit, in another process too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reflux_storage.errors import CorruptObject, NotFound
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.ops import StepFigures, StepSpec
from reflux_trainer.learner.state import StateCapture, StateMismatchError, restore

from .tiny import CONFIG, LOSS, digest, tiny_groups, tiny_learner, train

torch.set_num_threads(1)
KEY = "checkpoints/1/learner-00000.safetensors"


def _save(learner: Learner, store: ObjectStore, journal: Journal | None = None, epoch: int = 0) -> None:
    capture = StateCapture()
    capture.take(learner, journal or Journal(), epoch)
    capture.write(store, KEY)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def test_a_fresh_process_goes_on_bit_for_bit(store: ObjectStore, tmp_path: Path) -> None:
    learner = tiny_learner()
    train(learner, 3)
    _save(learner, store)
    train(learner, 2)
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from reflux_storage.stores import open_store\n"
        "from reflux_trainer.learner.state import restore\n"
        "from tiny import CONFIG, digest, train\n"
        f"learner = restore(open_store('file://{tmp_path}/store'), {KEY!r}, CONFIG, 0).learner\n"
        "train(learner, 2)\n"
        "print(learner.version, digest(learner))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.split() == ["5", digest(learner)]


def test_a_state_between_backward_and_step_keeps_the_gradient(store: ObjectStore) -> None:
    learner = tiny_learner()
    train(learner, 1)
    learner.forward_backward(tiny_groups()[:2], LOSS)
    _save(learner, store)
    loaded = restore(store, KEY, CONFIG, 0).learner
    for survivor in (learner, loaded):
        survivor.forward_backward(tiny_groups()[2:], LOSS)
        survivor.optim_step(StepSpec(learning_rate=1e-2))
    assert digest(loaded) == digest(learner)


def test_a_fresh_learner_without_moments_survives(store: ObjectStore) -> None:
    learner = tiny_learner()
    _save(learner, store)
    loaded = restore(store, KEY, CONFIG, 0).learner
    train(learner, 2)
    train(loaded, 2)
    assert digest(loaded) == digest(learner)


def test_counters_journal_epoch_and_random_state_come_back(store: ObjectStore) -> None:
    learner, journal = tiny_learner(), Journal()
    train(learner, 1)
    torch.rand(3, generator=learner.generator)
    learner.refused_steps = 4
    journal.record(1, "optim_step", StepFigures(0.1, 1, True, 0.2))
    _save(learner, store, journal, epoch=7)
    restored = restore(store, KEY, CONFIG, seed=99)
    assert (restored.learner.version, restored.learner.refused_steps, restored.epoch) == (1, 4, 7)
    assert restored.journal.recall(1, "optim_step") == StepFigures(0.1, 1, True, 0.2)
    drawn = [torch.rand(4, generator=each.generator) for each in (learner, restored.learner)]
    assert torch.equal(*drawn)


def test_a_copy_stands_still_while_training_goes_on(store: ObjectStore) -> None:
    learner = tiny_learner()
    train(learner, 1)
    before = digest(learner)
    capture = StateCapture()
    capture.take(learner, Journal(), 0)
    train(learner, 1)
    capture.write(store, KEY)
    assert digest(restore(store, KEY, CONFIG, 0).learner) == before != digest(learner)


def test_another_shape_and_a_foreign_object_are_refused_by_name(store: ObjectStore) -> None:
    learner = tiny_learner()
    _save(learner, store)
    other = type(CONFIG)(**{**CONFIG.__dict__, "vocab_size": 30})
    with pytest.raises(StateMismatchError, match=r"embed_tokens.*expected F32\[30, 16\]"):
        restore(store, KEY, other, 0)
    store.put_create_only("other", b"0123456789abcdef")
    with pytest.raises(CorruptObject):
        restore(store, "other", CONFIG, 0)
    with pytest.raises(NotFound):
        restore(store, "nothing", CONFIG, 0)
