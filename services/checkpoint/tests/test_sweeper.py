"""Garbage, retention and read-back, with a clock of our own."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reflux_checkpoint.catalog import Catalog, State
from reflux_checkpoint.manifest import CheckpointId, Cursor, StoredObject, make_id
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.retention import RetentionPolicy
from reflux_checkpoint.sweeper import Sweeper, SweepPolicy
from reflux_kit.errors import NotFound
from reflux_storage.restore import find_damage
from reflux_storage.stores.base import MIN_PART_BYTES
from reflux_storage.stores.folder import FolderStore
from reflux_storage.stream import TensorSource, write_tensors


@dataclass
class Bench:
    """The service's parts on one folder; `ahead` moves their clock."""

    root: Path
    keep_last: int = 2
    keep_every_steps: int = 0
    ahead: float = 0.0
    store: FolderStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = FolderStore(self.root)
        self.catalog = Catalog(self.store)
        self.protocol = CommitProtocol(self.store, self.catalog, self.now)
        retention = RetentionPolicy(keep_last=self.keep_last, keep_every_steps=self.keep_every_steps)
        policy = SweepPolicy(lease_seconds=100, scrub_every_seconds=1000, retention=retention)
        self.sweeper = Sweeper(self.store, self.catalog, self.protocol, policy, self.now)

    def now(self) -> float:
        return time.time() + self.ahead

    def begin(self, step: int) -> CheckpointId:
        id = make_id("r", 1, step, "q")
        self.protocol.begin(id)
        return id

    def save(self, step: int) -> CheckpointId:
        id = self.begin(step)
        source = TensorSource("w", "U8", (5000,), memoryview(bytes([step]) * 5000))
        receipt = write_tensors(self.store, f"{id.data_prefix}/model", [source])
        stored = StoredObject(receipt.key, receipt.size_bytes, receipt.checksum)
        self.protocol.commit(id, (stored,), Cursor(step, 0, step, 0, 0, 0, (), 0, ""))
        return id

    def steps(self) -> list[int]:
        return [record.id.step for record in self.catalog.newest_first("r")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_silent_writer_is_garbage_after_its_lease_and_not_before(bench: Bench) -> None:
    id = bench.begin(1)
    bench.store.put_create_only(f"{id.data_prefix}/model", b"abc")
    bench.store.begin(f"{id.data_prefix}/half", MIN_PART_BYTES)
    bench.ahead = 90
    bench.sweeper.sweep()
    record = bench.catalog.get(id)
    assert record is not None
    assert record.state is State.OPEN
    bench.ahead = 110
    bench.sweeper.sweep()
    assert list(bench.store.list("checkpoints/data/")) == []
    assert list(bench.store.list_uploads("")) == []
    with pytest.raises(NotFound):
        bench.protocol.commit(id, (), Cursor(0, 0, 0, 0, 0, 0, (), 0, ""))


def test_objects_of_nobody_are_garbage_too(bench: Bench) -> None:
    bench.store.put_create_only("checkpoints/data/r/000001-0000000001-0123456789abcdef/model", b"abc")
    bench.store.put_create_only("checkpoints/data/strange", b"abc")
    bench.ahead = 110
    bench.sweeper.sweep()
    assert [info.key for info in bench.store.list("checkpoints/data/")] == ["checkpoints/data/strange"]


def test_a_commit_that_died_half_way_can_be_repeated_within_the_lease_and_is_garbage_afterwards(bench: Bench) -> None:
    id = bench.begin(1)
    bench.store.put_create_only(f"{id.data_prefix}/model", b"abc")
    bench.protocol._take_up(id)
    bench.ahead = 90
    bench.sweeper.sweep()
    assert bench.catalog.wrong_objects(id, (StoredObject(f"{id.data_prefix}/model", 3, ""),)) == ()
    bench.ahead = 300
    bench.sweeper.sweep()
    assert bench.catalog.get(id) is None


def test_the_loser_of_a_step_is_collected_and_the_winner_stays(bench: Bench) -> None:
    loser = make_id("r", 1, 3, "loser")
    bench.protocol.begin(loser)
    bench.store.put_create_only(f"{loser.data_prefix}/model", b"abc")
    winner = bench.save(3)
    bench.ahead = 110
    bench.sweeper.sweep()
    assert bench.catalog.get(loser) is None
    latest = bench.catalog.latest("r")
    assert latest is not None
    assert latest.id == winner
    assert {info.key.split("/")[3] for info in bench.store.list("checkpoints/data/")} == {winner.key}


def test_retention_keeps_the_newest_and_every_nth(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep_last=2, keep_every_steps=4)
    for step in range(1, 8):
        bench.save(step)
    bench.sweeper.sweep()
    assert bench.steps() == [7, 6, 4]
    assert len(list(bench.store.list("checkpoints/data/"))) == 3
    assert bench.catalog.get(make_id("r", 1, 5, "q")) is None


def test_a_damaged_checkpoint_does_not_count_as_kept(bench: Bench) -> None:
    ids = [bench.save(step) for step in (1, 2, 3)]
    bench.store.delete(f"{ids[2].data_prefix}/model")
    bench.sweeper.sweep()
    assert bench.steps() == [3, 2, 1]


def test_sweeps_read_everything_back_one_at_a_time_and_again_when_it_is_old(bench: Bench) -> None:
    first, second = bench.save(1), bench.save(2)
    bench.sweeper.sweep()
    assert bench.catalog.scrubbed(second) is not None
    assert bench.catalog.scrubbed(first) is None
    bench.sweeper.sweep()
    assert bench.catalog.scrubbed(first) is not None
    (bench.root / second.data_prefix / "model").write_bytes(
        bytes(bench.store.head(f"{second.data_prefix}/model").size_bytes)
    )
    bench.sweeper.sweep()
    assert bench.catalog.latest("r").id == second  # type: ignore[union-attr]
    bench.ahead = 1100
    bench.sweeper.sweep()
    assert bench.catalog.latest("r").id == first  # type: ignore[union-attr]


def test_a_sweep_can_be_stopped_inside_a_read_back(bench: Bench) -> None:
    id = bench.save(1)
    answers = iter([False, True])
    bench.sweeper.sweep(lambda: next(answers, True))
    assert bench.catalog.scrubbed(id) is None


def test_a_damaged_announcement_ends_with_its_lease(bench: Bench) -> None:
    id = bench.begin(1)
    bench.store.put_if_match(id.begun_key, b"junk", bench.store.head(id.begun_key).etag)
    bench.ahead = 110
    bench.sweeper.sweep()
    assert bench.catalog.get(id) is None


def test_the_checksum_of_the_stream_is_the_one_that_scrubs_compare(bench: Bench) -> None:
    source = TensorSource("w", "U8", (3,), memoryview(b"abc"))
    assert find_damage(bench.store, write_tensors(bench.store, "k", [source])) == ""
