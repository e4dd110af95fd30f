"""One buffer that versions are pulled into, and offers as JSON."""

import numpy as np
import pytest
import xxhash

from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import ChecksumMismatch, LayoutError, ReadCancelled
from reflux_transfer.intake import Intake
from reflux_transfer.layout import Layout
from reflux_transfer.offers import Offer, layout_from_json, layout_to_json, offer_from_json, offer_to_json
from reflux_transfer.pull import Slice

LAYOUT = Layout.from_shapes({"a": ([5, 7], "float32"), "b": ([3], "bfloat16")})


@pytest.fixture
def owner():
    backend = ShmBackend()
    yield backend
    backend.close()


def offered(owner: ShmBackend, seed: int, epoch: int) -> tuple[Offer, dict[str, bytes]]:
    rng, region = np.random.default_rng(seed), owner.allocate(LAYOUT.region_bytes)
    tensors = {slot.name: rng.bytes(slot.nbytes) for slot in LAYOUT.slots}
    for slot in LAYOUT.slots:
        region.view[slot.offset : slot.end] = tensors[slot.name]
    slices = tuple(
        Slice(slot.name, slot.offset, slot.offset, slot.nbytes, xxhash.xxh3_64_intdigest(tensors[slot.name]))
        for slot in LAYOUT.slots
    )
    return Offer(epoch, epoch, "shm", owner.describe(region), slices), tensors


def test_each_version_overwrites_the_last_and_has_the_fingerprint_of_its_bytes(owner) -> None:
    intake = Intake(LAYOUT)
    for epoch in (1, 2):
        offer, tensors = offered(owner, epoch, epoch)
        report, fingerprint = intake.pull(offer_from_json(offer_to_json(offer)))
        assert report.bytes == LAYOUT.parameter_bytes
        assert {s.name: bytes(intake.view[s.offset : s.end]) for s in LAYOUT.slots} == tensors
        assert fingerprint == xxhash.xxh3_64_intdigest(b"".join(tensors.values()))
    intake.close()


def test_memory_of_the_caller_is_filled_in_place(owner) -> None:
    memory = bytearray(LAYOUT.region_bytes)
    intake = Intake(LAYOUT, memory)
    offer, tensors = offered(owner, 1, 1)
    intake.pull(offer)
    intake.close()
    assert memory[: len(tensors["a"])] == tensors["a"]


def test_changed_bytes_and_cancelled_pulls_are_errors(owner) -> None:
    intake = Intake(LAYOUT)
    offer, _ = offered(owner, 1, 1)
    with pytest.raises(ReadCancelled):
        intake.pull(offer, lambda: True)
    wrong = Slice("a", 0, 0, LAYOUT.slots[0].nbytes, offer.slices[0].checksum ^ 1)
    with pytest.raises(ChecksumMismatch):
        intake.pull(Offer(1, 1, "shm", offer.handle, (wrong,)))
    intake.close()


def test_layouts_survive_json_and_broken_ones_are_refused() -> None:
    rows = layout_to_json(LAYOUT)
    assert layout_from_json(rows) == LAYOUT
    rows[1][3] = 0
    with pytest.raises(LayoutError, match="overlap"):
        layout_from_json(rows)


@pytest.mark.parametrize("text", ["[]", "{}", "nothing", '{"version":1}'])
def test_what_is_no_offer_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        offer_from_json(text)
