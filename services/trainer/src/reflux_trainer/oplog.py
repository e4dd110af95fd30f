"""Learner operations as they are logged and replayed: what changes the model's state, in order, with its data."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reflux.trainer.v1 import learner_service_pb2 as pb

if TYPE_CHECKING:
    from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceAsyncStub

Operation = pb.ForwardBackwardRequest | pb.OptimStepRequest
_KINDS: dict[bytes, type[pb.ForwardBackwardRequest] | type[pb.OptimStepRequest]] = {
    b"F": pb.ForwardBackwardRequest,
    b"O": pb.OptimStepRequest,
}
COMPUTE_SECONDS = 600.0
"""Deadline of one compute call; the watchdog is the one that ends a run that stands still."""


def encode(operation: Operation) -> bytes:
    """One byte of kind, then the request."""
    kind = b"F" if isinstance(operation, pb.ForwardBackwardRequest) else b"O"
    return kind + operation.SerializeToString()


def decode(raw: bytes) -> Operation:
    """Reads what `encode` wrote."""
    return _KINDS[raw[:1]].FromString(raw[1:])


async def send(
    stub: "LearnerServiceAsyncStub", operation: Operation
) -> pb.ForwardBackwardResponse | pb.OptimStepResponse:
    """Runs one operation; repeating it is harmless."""
    if isinstance(operation, pb.ForwardBackwardRequest):
        return await stub.ForwardBackward(operation, timeout=COMPUTE_SECONDS)
    return await stub.OptimStep(operation, timeout=COMPUTE_SECONDS)


async def replay(
    stub: "LearnerServiceAsyncStub",
    logged: Sequence[tuple[int, bytes]],
    progress: Callable[[], None],
    adapter: str = "",
) -> None:
    """Runs logged operations in order, on the adapter if there is one.

    Calls `progress` after each, because all together may take long.
    """
    for _op_id, raw in logged:
        operation = decode(raw)
        operation.adapter = adapter
        await send(stub, operation)
        progress()
