"""The broker's memory in Redis: one hash per model with the epoch counter and the committed version, and records that
expire.

Keys: `weights:{model}` (hash: last_epoch, committed_epoch, committed, fingerprint), `weights:{model}:request:<id>`
(epoch, one hour) and `weights:{model}:version:<epoch>` (the version as clients see it, one day).
"""

import redis.asyncio

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_weight_broker import messages, parsing
from reflux_weight_broker.layouts import Layouts
from reflux_weight_broker.records import Committed, Phase, Transaction
from reflux_weight_broker.refusals import UnknownLayout

_REQUEST_SECONDS = 3600
_VERSION_SECONDS = 86400

# The request's key makes it safe to run twice: a client that lost the answer gets the same epoch.
_ALLOCATE = """
local known = redis.call('GET', KEYS[2])
if known then return tonumber(known) end
local epoch = math.max(tonumber(redis.call('HGET', KEYS[1], 'last_epoch') or '0'), tonumber(ARGV[1])) + 1
redis.call('HSET', KEYS[1], 'last_epoch', epoch)
redis.call('SET', KEYS[2], epoch, 'EX', ARGV[2])
return epoch
"""


class VersionStore:
    """Durable state of all models."""

    def __init__(self, client: redis.asyncio.Redis, layouts: Layouts) -> None:
        self._redis, self._layouts = client, layouts
        self._allocate = client.register_script(_ALLOCATE)

    async def load(self, model_id: str) -> tuple[int, Committed | None]:
        """Last begun epoch (0 for an unknown model) and the committed version."""
        fields = ("last_epoch", "committed_epoch", "committed", "fingerprint")
        last, epoch, raw, fingerprint = await self._redis.hmget(_key(model_id), *fields)
        if raw is None:
            return int(last or 0), None
        assert isinstance(raw, bytes), "the client must not decode"
        offer = pb.BeginVersionRequest.FromString(raw)
        try:
            manifest = parsing.parse_manifest(offer, await self._layouts.tensors(offer.layout_hash))
        except UnknownLayout:
            return int(last or 0), None  # nobody has used the version for weeks: late joiners wait for the next one
        return int(last or 0), Committed(int(epoch or 0), manifest, int(fingerprint or 0))

    async def last_epoch(self, model_id: str) -> int:
        """Last begun epoch, 0 for an unknown model."""
        return int(await self._redis.hget(_key(model_id), "last_epoch") or 0)

    async def allocate(self, model_id: str, request_id: str, publisher_epoch: int) -> int:
        """A new epoch, above everything begun and everything the publisher knows; the same one for the same request."""
        keys = [_key(model_id), f"{_key(model_id)}:request:{request_id}"]
        return int(await self._allocate(keys=keys, args=[publisher_epoch, _REQUEST_SECONDS]))

    async def epoch_of_request(self, model_id: str, request_id: str) -> int | None:
        """The epoch that a request started within the last hour."""
        raw = await self._redis.get(f"{_key(model_id)}:request:{request_id}")
        return int(raw) if raw is not None else None

    async def save(self, transaction: Transaction) -> None:
        """Stores a version; from COMMITTING on it is the committed one."""
        model_id = transaction.manifest.model_id
        async with self._redis.pipeline(transaction=True) as pipe:
            record = messages.to_version(transaction).SerializeToString()
            pipe.set(f"{_key(model_id)}:version:{transaction.epoch}", record, ex=_VERSION_SECONDS)
            if transaction.phase is Phase.COMMITTING:
                pipe.hset(_key(model_id), "committed_epoch", str(transaction.epoch))
                pipe.hset(_key(model_id), "committed", messages.to_stored(transaction.manifest).SerializeToString())
                pipe.hset(_key(model_id), "fingerprint", str(transaction.fingerprint))
            await pipe.execute()

    async def version(self, model_id: str, epoch: int) -> version_pb.WeightVersion | None:
        """A version of an earlier process: one that it had not decided is aborted, one that it had decided is
        committed.
        """
        raw = await self._redis.get(f"{_key(model_id)}:version:{epoch}")
        if raw is None:
            return None
        assert isinstance(raw, bytes), "the client must not decode"
        version = version_pb.WeightVersion.FromString(raw)
        if version.state == version_pb.WeightVersion.STATE_PREPARING:
            version.state = version_pb.WeightVersion.STATE_ABORTED
            version.error = "the broker restarted while the replicas prepared"
        elif version.state == version_pb.WeightVersion.STATE_COMMITTING:
            version.state = version_pb.WeightVersion.STATE_COMMITTED
        return version


def _key(model_id: str) -> str:
    return f"weights:{{{model_id}}}"
