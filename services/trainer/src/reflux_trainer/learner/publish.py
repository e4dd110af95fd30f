"""Distribution of weights: written by the thread that owns them, handed out by the broker while training goes on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from grpc.aio import AioRpcError, Channel

from reflux_model.parameters import Parameters
from reflux_storage.stores.base import ObjectStore
from reflux_trainer.learner.casting import caster
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.offer import Kind, SourceRegion, layout_of_rank
from reflux_transfer.client.publisher import BrokerPublisher, Published, Publishing
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend
from reflux_weightplan.spec import SpecLayout

log = logging.getLogger(__name__)

_DELTA_SHARE = 0.25
"""Room for a difference, in parts of the weights: enough at the density up to which one is made."""

WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Outlet:
    """How weights leave the learner: over which transport, in which type (rounded to nearest even), signed by what."""

    transport: str
    dtype: torch.dtype = torch.float32
    delta: bool = False
    """Versions are sent as their difference to the committed one, where that is small."""
    secret: str = field(default="", repr=False)
    """The stack's; empty signs nothing."""
    opened: Callable[[str], TransferBackend] = field(default=open_backend, repr=False)
    """Makes the backend of a transport."""


@dataclass(frozen=True, kw_only=True)
class PublishOrder:
    """What a caller asks of one publish."""

    request_id: str
    sync_timeout_seconds: float
    min_replicas: int = 0
    probe_token_ids: tuple[int, ...] = ()
    """Prompt that learner and replicas score; empty compares nothing."""
    adapter: str = ""
    """The LoRA adapter whose factors are published instead of the model."""
    publish_as: str = ""
    """Model of broker and gateway that gets full weights as `version`; empty: the model itself."""
    version: int = 0
    merged_adapter: str = ""
    """The LoRA adapter that is added in; without `publish_as` the version is the adapter's."""
    merged_from: tuple[ObjectStore, str] | None = None
    """With `publish_as`: the stored state of the adapter that is added in."""


class WeightPublisher:
    """The publishing half of one model; calls are made one after the other."""

    def __init__(
        self, channel: Channel, model_id: str, params: Parameters, outlet: Outlet, spread: SpecLayout | None = None
    ) -> None:
        """`spread` is the layout of all ranks where this process is rank 0 of several; `params` do not count then."""
        dtype = str(outlet.dtype).removeprefix("torch.")
        shapes = {name: (tuple(tensor.shape), dtype) for name, tensor in params.items()}
        self._cast = caster(outlet.dtype)
        self._backend = outlet.opened(outlet.transport)
        share = _DELTA_SHARE if outlet.delta else 0.0
        own = Layout.from_shapes(shapes) if spread is None else layout_of_rank(spread, 0)
        self._arenas = PublisherArenas(self._backend, own, delta_share=share)
        self._broker = BrokerPublisher(channel, model_id, self._arenas, layout=spread, secret=outlet.secret)
        self._others: Sequence[SourceRegion] = ()
        """What the other ranks have claimed for the version that begins next."""
        self._kind: Kind = "delta" if outlet.delta else "full"
        self.num_bytes = self._arenas.layout.parameter_bytes
        self.epoch = 0
        """Epoch of the last committed version."""

    def restored(self, epoch: int) -> None:
        """The weights come from a state that was saved at `epoch`."""
        self.epoch = epoch
        self._broker.restored(epoch)

    async def begin(self, version: int, order: PublishOrder, base_epoch: int = 0) -> Publishing:
        """Announces a version: replicas follow from now on, so write it soon. An adapter stands on `base_epoch`.

        Errors as in `BrokerPublisher.begin`.
        """
        return await self._broker.begin(
            version,
            kind="adapter" if order.adapter else self._kind,
            base_epoch=base_epoch if order.adapter else 0,
            sync_timeout_seconds=order.sync_timeout_seconds,
            min_replicas=order.min_replicas,
            request_id=order.request_id,
            probe_token_ids=order.probe_token_ids,
            others=self._others,
        )

    def write(self, publishing: Publishing, params: Parameters) -> None:
        """Copies the weights into the arena; called by the thread that owns them."""
        publishing.write({name: tensor.detach() for name, tensor in params.items()}, self._cast)

    async def report_probe(self, publishing: Publishing, logprobs: Sequence[float]) -> None:
        """The learner's score of the probe prompt. The version is published even if the broker does not take it."""
        try:
            await self._broker.report_probe(publishing.epoch, logprobs)
        except AioRpcError as error:
            log.warning("the probe of epoch %d is not compared: %s", publishing.epoch, error.details())

    async def finish(self, publishing: Publishing) -> Published:
        """Waits until all replicas serve what was written; errors as in `Publishing.finish`."""
        published = await publishing.finish()
        self.epoch = published.epoch
        return replace(published, bytes=self.num_bytes)

    async def close(self) -> None:
        """Withdraws the arenas."""
        await self._broker.close()
        self._arenas.close()
        self._backend.close()
