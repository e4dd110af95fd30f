"""How failures are named on the wire, and leases that come too late."""

import pytest

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux_transfer import errors
from reflux_transfer.client.leases import _apply
from reflux_transfer.client.wire import failure_of
from reflux_weightplan.errors import PlanRefused

Reason = pb.AckVersionRequest


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.ChecksumMismatch("w", 0, 1, 2, 3), Reason.REASON_CHECKSUM),
        (errors.DeltaDamaged("x"), Reason.REASON_CHECKSUM),
        (errors.GenerationGone("x"), Reason.REASON_GENERATION_GONE),
        (errors.WrongHandle("x"), Reason.REASON_GENERATION_GONE),
        (errors.PeerGone("x"), Reason.REASON_PEER_GONE),
        (errors.ReadDeadlineExceeded("x"), Reason.REASON_DEADLINE),
        (errors.BaseMismatch("x"), Reason.REASON_BASE_MISMATCH),
        (errors.LayoutError("x"), Reason.REASON_LAYOUT),
        (PlanRefused("x"), Reason.REASON_LAYOUT),
        (MemoryError("x"), Reason.REASON_ENGINE),
    ],
)
def test_every_failure_has_its_reason(error: Exception, reason: int) -> None:
    assert failure_of(error) == reason


class Arenas:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def lease(self, generation: int, holder: str, seconds: float) -> None:
        if generation != 1:
            raise KeyError(f"generation {generation} is gone")
        self.calls.append(("lease", holder, seconds))

    def release(self, generation: int, holder: str) -> None:
        self.calls.append(("release", holder))


def test_a_lease_on_a_generation_that_is_gone_is_no_error() -> None:
    arenas = Arenas()
    for generation, seconds in ((2, 5.0), (1, 5.0), (1, 0.0)):
        _apply(arenas, generation, "join/b", seconds)
    assert arenas.calls == [("lease", "join/b", 5.0), ("release", "join/b")]
