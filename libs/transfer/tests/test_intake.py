"""One buffer that versions are pulled into, and offers as JSON."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from reflux_transfer import fingerprint
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Offer, Route, SourceRegion
from reflux_transfer.errors import LayoutError, ReadCancelled
from reflux_transfer.intake import Intake
from reflux_transfer.layout import Layout
from reflux_transfer.offers import OfferReader, offer_to_json
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

LAYOUT = Layout.from_shapes({"a": ([5, 7], "float32"), "b": ([3], "bfloat16")})
SPEC = single_rank(LAYOUT)
TURNED = single_rank(Layout.from_shapes({"b": ([3], "bfloat16"), "a": ([5, 7], "float32")}))


class Owner:
    """Publishes random weights from memory of this process."""

    def __init__(self) -> None:
        self.backend = ShmBackend()
        self.arenas = PublisherArenas(self.backend, LAYOUT)

    def offer(self, epoch: int, target: SpecLayout = SPEC) -> tuple[Offer, dict[str, bytes]]:
        rng = np.random.default_rng(epoch)
        tensors = {"a": rng.standard_normal((5, 7), np.float32), "b": rng.integers(0, 99, 3, np.uint16)}
        staging = self.arenas.begin(0.0)
        staging.write(tensors)
        region = SourceRegion(0, staging.offer(), "shm", staging.generation)
        offer = Offer(epoch, epoch, "full", (region,), Route(SPEC, target, 0), time.monotonic() + 20, 20.0)
        return offer, {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.backend.close()


def held(intake: Intake) -> dict[str, bytes]:
    return {slot.name: bytes(intake.view[slot.offset : slot.end]) for slot in intake.layout.slots}


@pytest.mark.parametrize("target", [SPEC, TURNED], ids=["same layout", "another order"])
def test_each_version_overwrites_the_last_and_has_the_publishers_fingerprint(owner, target) -> None:
    intake, reader = Intake(target), OfferReader(target)
    for epoch in (1, 2):
        offer, tensors = owner.offer(epoch, target)
        report = intake.pull(reader.read(offer_to_json(offer)))
        assert held(intake) == tensors
        assert report.bytes >= LAYOUT.parameter_bytes
        assert report.fingerprint == owner.arenas.fingerprint(offer.regions[0].generation)
    if target is SPEC:
        assert report.fingerprint == fingerprint.of(intake.view, intake.layout)
    intake.close()


def test_a_layout_that_cuts_tensors_is_refused() -> None:
    rows = Placement((Cut(0, "tensor", "even"),))
    cut = SpecLayout(Mesh((("tensor", 2),)), (TensorSpec("a", (6, 7), "float32", rows),))
    with pytest.raises(LayoutError):
        Intake(cut)


def test_a_cancelled_pull_is_an_error(owner) -> None:
    intake = Intake(SPEC)
    with pytest.raises(ReadCancelled):
        intake.pull(owner.offer(1)[0], lambda: True)
    intake.close()


def test_a_deadline_travels_as_what_is_left_of_it(owner) -> None:
    offer, _ = owner.offer(1)
    late = Offer(1, 1, "full", offer.regions, offer.route, time.monotonic() - 5.0, 20.0)
    assert OfferReader(SPEC).read(offer_to_json(late)).seconds == 0.0
    assert 0 < OfferReader(SPEC).read(offer_to_json(offer)).seconds <= 20.0


def test_the_reader_of_an_offer_plans_as_its_source_has_staged(owner) -> None:
    columns = Placement((Cut(1, "rank"),))
    cut = SpecLayout(
        Mesh((("rank", 2),)), (TensorSpec("a", (5, 7), "float32", columns), TensorSpec("b", (3,), "bfloat16"))
    )
    reader, regions = OfferReader(SPEC), owner.offer(1)[0].regions
    for packed in (False, True):
        offer = Offer(1, 1, "full", regions, Route(cut, SPEC, 0, packed=packed), time.monotonic() + 20, 20.0)
        read = reader.read(offer_to_json(offer)).route
        assert (read.packed, read.plan_hash, read.moves) == (packed, offer.route.plan_hash, offer.route.moves)
        assert any(move.packed for move in read.moves) == packed


@pytest.mark.parametrize("text", ["[]", "{}", "nothing", '{"version":1,"regions":[[0]]}'])
def test_what_is_no_offer_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        OfferReader(SPEC).read(text)
