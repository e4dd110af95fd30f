"""Publishes weights through the broker: announce, write while replicas follow, wait for the outcome, free or pin."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpc.aio import AioRpcError, Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_version_pb2 import ReplicaState, WeightVersion
from reflux_kit.telemetry import span
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import Cast, Staging, copy
from reflux_transfer.client import wire
from reflux_transfer.client.announcer import CALL_SECONDS, Announcer, PublisherFenced, PublishRefused
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Kind, SourceRegion
from reflux_transfer.client.rank import PublisherRank, patience
from reflux_transfer.errors import TransferError
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.wire import layout_hash

__all__ = ["BrokerPublisher", "PublishAborted", "PublishRefused", "Published", "PublisherFenced", "Publishing"]


class PublishAborted(TransferError, RuntimeError):
    """The version was given up everywhere, the old one stays; the text is the broker's or the failing replica's."""


@dataclass(frozen=True)
class Published:
    """A committed version and what it took. `transfer_seconds` is the slowest replica's pull."""

    version: int
    epoch: int
    stage_seconds: float
    sync_seconds: float
    prepare_seconds: float
    transfer_seconds: float
    commit_seconds: float
    bytes: int
    replicas: tuple[ReplicaState, ...]
    fingerprint: int = 0
    """Of what was published; that of all replicas."""

    control_messages: int = 0
    """Calls and events between broker, publisher and replicas."""


class Publishing:
    """A version that replicas follow already: write it, then `finish`; as a context it is given up on errors."""

    def __init__(self, owner: "BrokerPublisher", staging: Staging, begun: "_Begun", base: int | None) -> None:
        self.staging = staging
        """Where the weights go: `write` it once."""

        self._owner, self._begun, self._base = owner, begun, base

    @property
    def epoch(self) -> int:
        """The version's, as the broker began it."""
        return self._begun.version.epoch

    def write(self, tensors: Mapping[str, Any], cast: Cast = copy) -> int:
        """`staging.write`, with the difference to the committed version when a delta is published. Blocks."""
        return self.staging.write(tensors, cast, base=self._base)

    async def finish(self) -> Published:
        """Waits until all replicas serve the version.

        Raises `PublishAborted`, `PublishRefused`, `PublisherFenced`, or `AioRpcError` when the broker stays away.
        """
        return await self._owner.finish(self, self._begun)

    def close(self) -> None:
        """Gives the version up unless it was finished; replicas see the staging fail at once."""
        self._owner.give_up(self.staging)

    async def __aenter__(self) -> "Publishing":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


@dataclass
class _Begun:
    """What was announced, and until when, in monotonic seconds, its outcome is waited for."""

    request: pb.BeginVersionRequest
    version: WeightVersion
    started: float
    end: float
    repeated: bool
    """An earlier call with this request id had committed it already, from another arena."""


class BrokerPublisher:
    """The one publisher of a model; one version after the other. A fresh one takes over from its predecessor."""

    def __init__(
        self,
        channel: Channel,
        model_id: str,
        arenas: PublisherArenas,
        *,
        layout: SpecLayout | None = None,
        secret: str = "",
    ) -> None:
        """`layout` is that of all ranks of the publisher, `arenas` are those of rank 0: this process. Without it there
        are no others.

        With the stack's `secret` the handles are signed, see `wire.scope_of`.
        """
        self._model_id, self._layout = model_id, layout or single_rank(arenas.layout)
        self._rank = PublisherRank(channel, model_id, arenas, layout=self._layout, secret=secret)
        self._announcer = Announcer(channel, model_id, self._layout)
        self._replay = True
        self._committed: tuple[int, int] = (0, 0)
        """Epoch and generation that are pinned."""

    def restored(self, epoch: int = 0) -> None:
        """The weights came from a checkpoint of `epoch`: the next version may be lower than the committed one."""
        self._replay, self._announcer.floor = True, max(self._announcer.floor, epoch)

    async def begin(
        self,
        version: int,
        *,
        sync_timeout_seconds: float,
        kind: Kind = "full",
        base_epoch: int = 0,
        min_replicas: int = 0,
        request_id: str = "",
        probe_token_ids: Sequence[int] = (),
        others: Sequence[SourceRegion] = (),
    ) -> Publishing:
        """Claims an arena and announces the version, which replicas follow while it is written.

        They have the timeout to prepare, the writing included, and again to commit. A delta starts from the version
        that this publisher committed last, without one it is published in full; `base_epoch` is that of an adapter.
        `others` are the regions that the publisher's other ranks have claimed for it (`PublisherRank`), in their order.

        Raises `ArenasBusy`, `PublishRefused`, `PublisherFenced`, or `AioRpcError` when the broker stays away.
        """
        started = time.monotonic()
        staging = await self._rank.claim(sync_timeout_seconds)
        committed_epoch, base = self._committed
        kind = "full" if kind == "delta" and not base else kind
        request = pb.BeginVersionRequest(
            request_id=request_id or str(uuid.uuid4()),
            model_id=self._model_id,
            version=version,
            replay=self._replay,
            layout_hash=layout_hash(self._layout),
            regions=[wire.to_region(each) for each in (self._rank.region(staging), *others)],
            kind=wire.KINDS[kind],
            base_epoch=committed_epoch if kind == "delta" else base_epoch,
            probe_token_ids=probe_token_ids,
            sync_timeout_seconds=sync_timeout_seconds,
            min_replicas=min_replicas,
        )
        begun = _Begun(request, WeightVersion(), started, started + patience(sync_timeout_seconds), False)
        publishing = Publishing(self, staging, begun, base if kind == "delta" else None)
        try:
            begun.version, begun.repeated = await self._announcer.announce(request, begun.end)
        except (TransferError, AioRpcError, asyncio.CancelledError):
            publishing.close()
            raise
        return publishing

    async def finish(self, publishing: Publishing, begun: _Begun) -> Published:
        """For `Publishing.finish`."""
        staging, committed = publishing.staging, False
        try:
            with span("weights.publish", version=begun.request.version):
                outcome = await self._announcer.settle(begun.request, begun.version, begun.end)
            committed = outcome.state == WeightVersion.STATE_COMMITTED
        finally:
            self._rank.settle(staging, committed=committed and not begun.repeated)
        if not committed:
            version = begun.request.version
            raise PublishAborted(f"epoch {outcome.epoch} (version {version}) was aborted: {outcome.error}")
        if not begun.repeated:
            self._committed = outcome.epoch, staging.generation
        self._replay = False
        return _published(outcome, begun, staging.seconds)

    def give_up(self, staging: Staging) -> None:
        """For `Publishing.close`."""
        self._rank.settle(staging, committed=False)

    async def close(self) -> None:
        """Stops listening to leases; the arenas stay."""
        await self._rank.close()

    async def report_probe(self, epoch: int, logprobs: Sequence[float]) -> None:
        """The learner's log-probs of the probe prompt under an epoch; replicas that differ become unhealthy."""
        request = pb.ReportProbeRequest(model_id=self._model_id, epoch=epoch, logprobs=logprobs)
        await self._announcer.stub.ReportProbe(request, timeout=CALL_SECONDS)


def _published(outcome: WeightVersion, begun: _Begun, stage_seconds: float) -> Published:
    return Published(
        begun.request.version,
        outcome.epoch,
        stage_seconds,
        time.monotonic() - begun.started,
        outcome.prepare_seconds,
        max((replica.transfer_seconds for replica in outcome.replicas), default=0.0),
        outcome.commit_seconds,
        outcome.bytes,
        tuple(outcome.replicas),
        outcome.fingerprint,
        outcome.control_messages,
    )
