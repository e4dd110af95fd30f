"""Layouts by hash, in Redis and for the latest ones in memory.

Key `weights:layout:<hash>` holds the serialized WeightLayout for 30 days after its last use. Whoever still needs a
forgotten one is told so and sends it again.
"""

import asyncio
import math
from collections import OrderedDict

import redis.asyncio
from google.protobuf.message import DecodeError

from reflux.weight_broker.v1 import weight_layout_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_transfer.client.layouts import from_message
from reflux_weight_broker.plan import Tensors
from reflux_weight_broker.refusals import UnknownLayout
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.sides import Side
from reflux_weightplan.wire import layout_hash

_SECONDS = 30 * 86400
_KNOWN = 64
MAX_BYTES = 64 << 20
_MAX_RANKS = 65536
_MAX_DIMS = 8
_MAX_BYTES_OF_MODEL = 1 << 62


class Layouts:
    """All layouts of the stack."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._known: OrderedDict[str, Tensors] = OrderedDict()

    async def put(self, data: bytes) -> str:
        """Stores a serialized WeightLayout and returns its hash. Raises `InvalidRequest` naming tensors or axes."""
        tensors = await asyncio.to_thread(parse, data)
        await self._redis.set(_key(tensors.hash), data, ex=_SECONDS)
        self._remember(tensors)
        return tensors.hash

    async def get(self, name: str) -> bytes:
        """The serialized layout. Raises `UnknownLayout`."""
        data = await self._redis.getex(_key(name), ex=_SECONDS)
        if data is None:
            raise UnknownLayout(f"no layout {name} is stored: send it with PutLayout")
        assert isinstance(data, bytes), "the client must not decode"
        return data

    async def tensors(self, name: str) -> Tensors:
        """The tensors of a layout. Raises `UnknownLayout`."""
        if name in self._known:
            self._known.move_to_end(name)
        else:
            self._remember(await asyncio.to_thread(parse, await self.get(name)))
        return self._known[name]

    def _remember(self, tensors: Tensors) -> None:
        self._known[tensors.hash] = tensors
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def parse(data: bytes) -> Tensors:
    """What the broker has to know of a serialized WeightLayout; takes half a second for 45,000 tensors."""
    try:
        message = pb.WeightLayout.FromString(data)
    except DecodeError:
        raise InvalidRequest("the chunks are no serialized WeightLayout", field="chunk") from None
    _check_sizes(message)
    try:
        layout = from_message(message)
        name = layout_hash(layout)
        Side(layout)  # refuses ranks without tensors, and members of a fused tensor that do not go together
    except LayoutRefused as refusal:
        raise InvalidRequest(f"layout: {refusal}", field="layout") from None
    shapes = {tensor.name: (tensor.shape, tensor.dtype) for tensor in layout.tensors}
    return Tensors(name, layout.mesh.ranks, shapes)


def _check_sizes(message: pb.WeightLayout) -> None:
    """Bounds what the checks of a layout may cost."""
    ranks = math.prod(axis.size for axis in message.axes)
    if ranks > _MAX_RANKS:
        raise InvalidRequest(f"layout: at most {_MAX_RANKS} ranks, not {ranks}", field="axes")
    for tensor in message.tensors:
        if len(tensor.shape) > _MAX_DIMS or math.prod(tensor.shape) > _MAX_BYTES_OF_MODEL // 8:
            raise InvalidRequest(f"layout: tensor {tensor.name} is too large: {list(tensor.shape)[:9]}", field="shape")


def _key(name: str) -> str:
    return f"weights:layout:{name}"
