"""Sessions, models, checkpoints and samplers in Redis, each seen by its tenant only."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from reflux_kit.errors import Conflict, NotFound
from reflux_trainer.queue.client import RedisClient
from reflux_trainer.tinker import names
from reflux_trainer.tinker.records import Checkpoint, Lora, Model, Record, Sampler, Session, Weights

R = TypeVar("R", bound=Record)
_ALIVE = "tinker:alive"
"""Sorted set of sessions by the Unix time of their last sign of life."""
_TRIES = 20
_CHANGE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[4] == '' then redis.call('ZREM', KEYS[2], ARGV[3]) else redis.call('ZADD', KEYS[2], ARGV[4], ARGV[3]) end
return 1
"""
_CLIENTS_SECONDS = 30 * 86400
"""How long clients of a sampling session are counted after the last one that joined."""
_EXPIRING = "tinker:expiring"
"""Sorted set of checkpoints by the Unix time at which they expire."""


class Catalog:
    """What other tenants own does not exist: asking for it is NotFound."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._change = redis.register_script(_CHANGE)

    async def add_session(self, session: Session) -> None:
        """Stores a session and counts it as alive."""
        await self._redis.set(f"tinker:session:{session.session_id}", session.to_json())
        await self._redis.zadd(f"tinker:sessions:{session.tenant}", {session.session_id: session.created_at})
        await self._redis.zadd(_ALIVE, {session.session_id: session.created_at})

    async def session(self, tenant: str, session_id: str) -> Session:
        """Raises NotFound."""
        return await self._own(Session, f"tinker:session:{session_id}", tenant, "session", session_id)

    async def alive(self, session_id: str) -> None:
        """Notes a sign of life of a session that is not over."""
        await self._redis.zadd(_ALIVE, {session_id: time.time()}, xx=True)

    async def end_session(self, session_id: str) -> list[Sampler]:
        """Forgets that a session lives, and its samplers, which are returned; named weights are not theirs."""
        await self._redis.zrem(_ALIVE, session_id)
        found = [await self._sampler(name) for name in await self.members("samplers", session_id)]
        ended = [each for each in found if each is not None]
        for each in ended:
            await self._redis.delete(f"tinker:sampler:{each.sampler_id}")
            await self._redis.zrem(f"tinker:samplers:{session_id}", each.sampler_id)
        return ended

    async def silent_sessions(self, before: float) -> list[str]:
        """Sessions without a sign of life since `before` (Unix time)."""
        return [raw.decode() for raw in await self._redis.zrangebyscore(_ALIVE, 0, before, start=0, num=100)]

    async def members(self, what: str, of: str) -> list[str]:
        """Ids in an index, newest first: models or samplers of a session, models or sessions of a tenant."""
        return [raw.decode() for raw in await self._redis.zrevrange(f"tinker:{what}:{of}", 0, -1)]

    async def add_model(self, model: Model) -> None:
        """Stores a model; one that exists stays as it is."""
        await self._redis.set(f"tinker:model:{model.model_id}", model.to_json(), nx=True)
        for of in (model.tenant, model.session_id):
            await self._redis.zadd(f"tinker:models:{of}", {model.model_id: model.created_at})

    async def make_model(
        self,
        tenant: str,
        session: str,
        number: int,
        base: str,
        lora: Lora,
        metadata: Mapping[str, Any] | None = None,
        copied_from: str = "",
    ) -> Model:
        """Stores model `number` of a session, and returns it, or the one that is there.

        Raises NotFound, and Conflict where the slot is taken by a copy of something else, or by what is no copy.
        """
        model = Model(
            model_id=names.model_id(session, number),
            session_id=session,
            tenant=tenant,
            base_model=base,
            created_at=time.time(),
            lora=asdict(lora),
            user_metadata=metadata,
            copied_from=copied_from,
        )
        await self.add_model(model)
        found = await self.model(tenant, model.model_id)
        if found.copied_from != copied_from:
            holds = f"a copy of {found.copied_from}" if found.copied_from else "a model that is trained"
            raise Conflict(f"{found.model_id} holds {holds}; take another model_seq_id")
        return found

    async def model(self, tenant: str, model_id: str) -> Model:
        """Raises NotFound."""
        return await self._own(Model, f"tinker:model:{model_id}", tenant, "model", model_id)

    async def any_model(self, model_id: str) -> Model | None:
        """The model, whoever owns it."""
        raw = await self._redis.get(f"tinker:model:{model_id}")
        return Model.from_json(raw) if raw else None

    async def add_sampler(self, sampler: Sampler) -> None:
        """Stores a sampling session."""
        await self._redis.set(f"tinker:sampler:{sampler.sampler_id}", sampler.to_json())
        await self._redis.zadd(f"tinker:samplers:{sampler.session_id}", {sampler.sampler_id: sampler.created_at})

    async def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Raises NotFound."""
        return await self._own(Sampler, f"tinker:sampler:{sampler_id}", tenant, "sampler", sampler_id)

    async def _sampler(self, sampler_id: str) -> Sampler | None:
        raw = await self._redis.get(f"tinker:sampler:{sampler_id}")
        return Sampler.from_json(raw) if raw else None

    async def any_sampler(self, sampler_id: str) -> Sampler | None:
        """The sampling session, whoever owns it."""
        return await self._sampler(sampler_id)

    async def newest(self, model_id: str) -> Weights | None:
        """What inflight samplers of a model serve."""
        raw = await self._redis.get(f"tinker:inflight:{model_id}")
        return Weights.from_json(raw) if raw else None

    async def set_newest(self, model_id: str, weights: Weights) -> Weights | None:
        """Moves the inflight samplers of a model on; returns what they served."""
        before = await self.newest(model_id)
        await self._redis.set(f"tinker:inflight:{model_id}", weights.to_json())
        return before

    async def add_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Stores a checkpoint; returns the one that it replaces."""
        key = f"tinker:checkpoint:{checkpoint.uri}"
        before = await self._redis.get(key)
        await self._redis.set(key, checkpoint.to_json())
        await self._redis.zadd(f"tinker:checkpoints:{checkpoint.model_id}", {checkpoint.uri: checkpoint.created_at})
        if checkpoint.expires_at is None:
            await self._redis.zrem(_EXPIRING, checkpoint.uri)
        else:
            await self._redis.zadd(_EXPIRING, {checkpoint.uri: checkpoint.expires_at})
        return Checkpoint.from_json(before) if before else None

    async def checkpoint(self, tenant: str, uri: str) -> Checkpoint:
        """A checkpoint of the tenant's own. Raises NotFound, InvalidRequest for what is not an address."""
        await self.model(tenant, names.parse_uri(uri).model)
        return await self._stored(uri)

    async def readable_checkpoint(self, tenant: str, uri: str) -> Checkpoint:
        """One that the tenant may read: its own, or a published one. Errors as above."""
        model = await self.any_model(names.parse_uri(uri).model)
        found = await self._stored(uri)
        if model is None or (model.tenant != tenant and not found.public):
            raise NotFound(f"there is no checkpoint {uri}")
        return found

    async def _stored(self, uri: str) -> Checkpoint:
        return _kept(uri, await self._redis.get(f"tinker:checkpoint:{uri}"))

    async def join_sampler(self, sampler_id: str) -> int:
        """A number for one more client of a sampling session; the first client is 0."""
        key = f"tinker:clients:{sampler_id}"
        number = int(await self._redis.incr(key))
        await self._redis.expire(key, _CLIENTS_SECONDS)
        return number

    async def checkpoints(self, model_id: str) -> list[Checkpoint]:
        """Checkpoints of a model, newest first, without expired ones."""
        found = [
            await self._redis.get(f"tinker:checkpoint:{uri}") for uri in await self.members("checkpoints", model_id)
        ]
        parsed = [Checkpoint.from_json(raw) for raw in found if raw]
        return [each for each in parsed if each.expires_at is None or each.expires_at >= time.time()]

    async def change_checkpoint(self, tenant: str, uri: str, **changes: Any) -> None:
        """Changes fields of a checkpoint of the tenant's own; where it is overwritten meanwhile, of the new one.

        Raises NotFound, also for one that is removed meanwhile, and Conflict for one that changes all the time.
        """
        key = f"tinker:checkpoint:{uri}"
        await self.model(tenant, names.parse_uri(uri).model)
        for _ in range(_TRIES):
            before = await self._redis.get(key)
            changed = replace(_kept(uri, before), **changes)
            expires_at = "" if changed.expires_at is None else changed.expires_at
            if await self._change(keys=[key, _EXPIRING], args=[before, changed.to_json(), uri, expires_at]):
                return
        raise Conflict(f"{uri} changes too often; try again")

    async def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint; its objects are the caller's to remove."""
        await self._redis.delete(f"tinker:checkpoint:{checkpoint.uri}")
        await self._redis.zrem(f"tinker:checkpoints:{checkpoint.model_id}", checkpoint.uri)
        await self._redis.zrem(_EXPIRING, checkpoint.uri)

    async def expired_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints whose time is over and that are still stored."""
        uris = await self._redis.zrangebyscore(_EXPIRING, 0, time.time(), start=0, num=100)
        found = [await self._redis.get(f"tinker:checkpoint:{uri.decode()}") for uri in uris]
        return [Checkpoint.from_json(raw) for raw in found if raw]

    async def _own(self, kind: type[R], key: str, tenant: str, what: str, name: str) -> R:
        raw = await self._redis.get(key)
        found = kind.from_json(raw) if raw else None
        if found is None or found.tenant != tenant:  # pyright: ignore[reportAttributeAccessIssue]
            raise NotFound(f"there is no {what} {name[:120]!r}")
        return found


def _kept(uri: str, raw: bytes | None) -> Checkpoint:
    """What a checkpoint's key holds. Raises NotFound for none, and for one whose time is over."""
    found = Checkpoint.from_json(raw) if raw else None
    if found is None or (found.expires_at is not None and found.expires_at < time.time()):
        raise NotFound(f"there is no checkpoint {uri}")
    return found
