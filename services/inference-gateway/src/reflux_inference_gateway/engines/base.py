"""How the gateway speaks to one replica's generation API, whatever engine is behind it."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence

from reflux.common.v1.common_pb2 import Sample
from reflux_inference_gateway.wire import GroupCall


class ReplicaClient(ABC):
    """One replica.

    Contract: a broken connection surfaces as `dispatch.ReplicaLost`, a refusal by the engine as a `ServiceError`.
    Samples are passed on as the messages that came; of a call that is a share of a group (`first_sample`), each gets
    its index in the group, and draws what it would have drawn had one replica taken all.
    """

    @abstractmethod
    def generate(
        self, call: GroupCall, deadline_seconds: float | None, serving: Callable[[], int]
    ) -> AsyncGenerator[Sequence[Sample], None]:
        """Yields finished samples until the group is complete; closing the iterator cancels the group there.

        `serving` is the weight version that the replica says it serves, for engines that do not mark their tokens.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends a group early; what it has comes through `generate` with finish_reason "abort"."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connection."""
