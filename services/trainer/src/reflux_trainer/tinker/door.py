"""The API's verbs: what each request means for sessions, models, samplers and futures. HTTP is elsewhere."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from redis.exceptions import RedisError

from reflux_kit.errors import Conflict, InvalidRequest, NotFound, ServiceError
from reflux_storage.errors import StorageError
from reflux_trainer.tinker import bodies, names, wire
from reflux_trainer.tinker.blobs import Blobs
from reflux_trainer.tinker.calls import check_sample, close_call, open_call
from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.desks import Desks
from reflux_trainer.tinker.futures import Future, FutureTable
from reflux_trainer.tinker.operations import CREATE, FORWARD, FORWARD_BACKWARD, LOAD
from reflux_trainer.tinker.records import Lora, Model, Progress, Sampler, Session, Weights
from reflux_trainer.tinker.settings import TinkerSettings
from reflux_trainer.tinker.shelf import Shelf

log = logging.getLogger(__name__)
_SWEEP_SECONDS = 10.0
_HEARTBEAT_SECONDS = 60.0


class ResultGone(ServiceError):
    """The future is not known any more; the client sends its request again."""

    reason = "RESULT_GONE"


@dataclass(frozen=True)
class Pending:
    """A future that is not done, and why."""

    request_id: str
    paused: bool
    reason: str


class Door:
    """Owns the order of steps only; what it needs is given."""

    def __init__(
        self, settings: TinkerSettings, catalog: Catalog, futures: FutureTable, blobs: Blobs, desks: Desks
    ) -> None:
        self.settings, self.catalog, self.desks = settings, catalog, desks
        self.shelf = Shelf(catalog, blobs)
        self._futures, self._blobs = futures, blobs

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Takes open futures up that an earlier process left, and sweeps until the block ends."""
        async with self.desks.closing():
            await self._adopt()
            sweeping = asyncio.create_task(self._sweep(), name="tinker-sweep")
            try:
                yield
            finally:
                sweeping.cancel()
                await asyncio.gather(sweeping, return_exceptions=True)

    async def _adopt(self) -> None:
        for owner, seq_ids in (await self._futures.adopt()).items():
            try:
                if model := await self.catalog.any_model(owner):
                    self.desks.worker(model).wake()
                elif sampler := await self.catalog.any_sampler(owner):
                    for seq_id in seq_ids:
                        await self._draw(sampler, seq_id)
            except (InvalidRequest, StorageError) as error:  # a base that is not offered any more, a lost payload
                log.warning("open futures of %s are left alone: %s", owner, error)

    async def _draw(self, sampler: Sampler, seq_id: int) -> None:
        found = await self._futures.payload(sampler.sampler_id, seq_id)
        desk = self.desks.of(sampler.base_model).sampling
        if found is not None and desk.find(sampler.sampler_id, seq_id) is None:
            desk.add(open_call(sampler, seq_id, found[1]))

    async def _sweep(self) -> None:
        silence = self.settings.session_seconds
        heard_from = time.time() + _HEARTBEAT_SECONDS  # before, clients may not have found this trainer yet
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                for session_id in await self.catalog.silent_sessions(time.time() - silence):
                    if time.time() > heard_from:
                        log.info("session %s was silent for %g s and is over", session_id, silence)
                        await self._end_session(session_id)
                for checkpoint in await self.catalog.expired_checkpoints():
                    await self.shelf.remove(checkpoint)
                await self._futures.sweep()
                await self.desks.rest()
            except (RedisError, StorageError, ServiceError) as error:
                log.warning("a sweep of the Tinker API broke off, the next one goes on: %s", error)

    async def create_session(self, tenant: str, body: bodies.CreateSession) -> Session:
        """Opens a session."""
        session = Session(
            session_id=uuid4().hex,
            tenant=tenant,
            created_at=time.time(),
            display_name=body.display_name,
            user_metadata=body.user_metadata,
        )
        await self.catalog.add_session(session)
        return session

    async def heartbeat(self, tenant: str, session_id: str) -> None:
        """Keeps a session alive. Raises NotFound."""
        await self.catalog.session(tenant, session_id)
        await self.catalog.alive(session_id)

    async def finish_session(self, tenant: str, session_id: str) -> None:
        """Ends a session: its samplers go, its models leave the learner. Raises NotFound."""
        await self.catalog.session(tenant, session_id)
        await self._end_session(session_id)

    async def _end_session(self, session_id: str) -> None:
        for sampler in await self.catalog.end_session(session_id):
            await self.desks.of(sampler.base_model).sampling.cancel_all(sampler.sampler_id)
            if sampler.kind == "snapshot":
                await self._blobs.drop(key for key, *_ in sampler.stored.objects)
        for model_id in await self.catalog.members("models", session_id):
            if model := await self.catalog.any_model(model_id):
                worker = self.desks.worker(model)
                await worker.give_up_gaps()
                await worker.unload()

    async def create_model(self, tenant: str, raw: bytes) -> str:
        """Makes a model on a base; returns the id of the future."""
        body = bodies.parse(bodies.CreateModel, raw)
        await self.catalog.session(tenant, body.session_id)
        self.desks.of(body.base_model)
        _check_adamw(body.optimizer_config)
        shape = body.lora_config or bodies.LoraConfig()
        if not (shape.train_attn or shape.train_mlp or shape.train_unembed):
            raise InvalidRequest("lora_config trains nothing: set train_attn, train_mlp or train_unembed")
        seed = random.getrandbits(31) if shape.seed is None else shape.seed
        lora = Lora(
            rank=shape.rank,
            seed=seed,
            train_attn=shape.train_attn,
            train_mlp=shape.train_mlp,
            train_unembed=shape.train_unembed,
        )
        model = await self.catalog.make_model(
            tenant, body.session_id, body.model_seq_id, body.base_model, lora, body.user_metadata
        )
        return await self._log(tenant, model, 0, CREATE, raw)

    async def forward_backward(self, tenant: str, raw: bytes) -> tuple[str, str]:
        """Logs a batch; returns the ids of future and model."""
        request = wire.parse_forward_backward(raw)
        model = await self.catalog.model(tenant, request.model_id)
        payload = request.SerializeToString(deterministic=True)
        kind = FORWARD if request.forward_only else FORWARD_BACKWARD
        return await self._log(tenant, model, request.seq_id, kind, payload), model.model_id

    async def operate(self, tenant: str, kind: str, body: type[bodies.Ordered], raw: bytes) -> tuple[str, str]:
        """Logs an operation with a JSON body; returns the ids of future and model."""
        parsed = bodies.parse(body, raw)
        model = await self.catalog.model(tenant, parsed.model_id)
        return await self._log(tenant, model, parsed.seq_id, kind, raw), model.model_id

    async def load_weights(self, tenant: str, raw: bytes) -> tuple[str, str]:
        """Logs a load into a model, or makes a model of a checkpoint; returns the ids of future and model."""
        body = bodies.parse(bodies.LoadWeights, raw)
        if body.session_id is None:
            if body.model_id is None or body.seq_id is None:
                raise InvalidRequest("load_weights needs model_id and seq_id, or session_id and model_seq_id")
            model = await self.catalog.model(tenant, body.model_id)
            return await self._log(tenant, model, body.seq_id, LOAD, raw), model.model_id
        if body.model_seq_id is None:
            raise InvalidRequest("model_seq_id is required with session_id", field="model_seq_id")
        await self.catalog.session(tenant, body.session_id)
        _check_adamw(body.optimizer_config or bodies.OptimizerConfig())
        source = await self.catalog.readable_checkpoint(tenant, body.path)
        base = body.base_model or source.base_model
        self.desks.of(base)
        lora = Lora(**source.lora)
        model = await self.catalog.make_model(
            tenant, body.session_id, body.model_seq_id, base, lora, body.user_metadata
        )
        return await self._log(tenant, model, 0, LOAD, raw), model.model_id

    async def _log(self, tenant: str, model: Model, seq_id: int, kind: str, payload: bytes) -> str:
        progress = await self._futures.progress(model.model_id)
        if seq_id < progress.next_seq and await self._futures.get(model.model_id, seq_id) is None:
            raise Conflict(f"operation {seq_id} of {model.model_id} is done, and its result is no longer kept")
        digest = payload if kind in (FORWARD, FORWARD_BACKWARD) else bodies.canonical(payload)
        awaited = seq_id == progress.next_seq  # what others wait behind is never one too many
        await self._futures.submit(tenant, model.model_id, seq_id, kind, payload, digest, awaited=awaited)
        self.desks.worker(model).wake()
        return names.request_id(model.model_id, seq_id)

    async def create_sampler(self, tenant: str, body: bodies.CreateSamplingSession) -> Sampler:
        """Opens a sampling session on a base model or on saved weights."""
        await self.catalog.session(tenant, body.session_id)
        if body.model_path is None:
            if body.base_model is None:
                raise InvalidRequest("base_model or model_path is required", field="base_model")
            base, weights = body.base_model, Weights()
        else:
            source = await self.catalog.readable_checkpoint(tenant, body.model_path)
            base, weights = source.base_model, source.stored
        self.desks.of(base)
        sampler = Sampler(
            sampler_id=names.sampler_id(body.session_id, body.sampling_session_seq_id),
            session_id=body.session_id,
            tenant=tenant,
            base_model=base,
            kind="named" if body.model_path else "base",
            model_path=body.model_path,
            weights=asdict(weights),
            created_at=time.time(),
        )
        await self.catalog.add_sampler(sampler)
        return sampler

    async def sample(self, tenant: str, raw: bytes) -> tuple[str, int]:
        """Logs a sampling request; returns the id of the future and how many samples it draws."""
        body = bodies.parse(bodies.Sample, raw)
        sampler = await self.catalog.sampler(tenant, body.sampling_session_id)
        check_sample(body, self.desks.of(sampler.base_model).base.vocab_size)
        seed = random.getrandbits(63) if body.sampling_params.seed is None else body.sampling_params.seed
        payload = close_call(raw, seed)
        desk = self.desks.of(sampler.base_model).sampling
        if await self._futures.submit(tenant, sampler.sampler_id, body.seq_id, "A", payload, bodies.canonical(raw)):
            desk.add(open_call(sampler, body.seq_id, payload))
        elif desk.find(sampler.sampler_id, body.seq_id) is None:
            await self._draw(sampler, body.seq_id)  # a command that Redis did twice says "known" the second time
        return names.request_id(sampler.sampler_id, body.seq_id), body.num_samples

    async def retrieve(self, tenant: str, request_id: str) -> Future | Pending:
        """The future when it is done, or why it is not, after a while. Raises ResultGone, NotFound."""
        owner, seq_id = names.split_request_id(request_id)
        found = await self._futures.await_done(owner, seq_id, self.settings.poll_seconds)
        if found is None:
            # Only what was the caller's may be sent again.
            kind = self.catalog.model if ":train:" in owner else self.catalog.sampler
            await kind(tenant, owner)
            raise ResultGone(f"the result of {request_id[:160]} is not there any more")
        if found.tenant != tenant:
            raise NotFound(f"there is no future {request_id[:160]!r}")
        if found.done:
            return found
        return await self._pending(request_id, owner, seq_id)

    async def ended(self, tenant: str, body: bodies.Ends) -> tuple[list[dict[str, Any]], int]:
        """Which futures of a sampling session have ended, as the SDK reads it, and the cursor behind them."""
        owner = (await self.catalog.sampler(tenant, body.target.sampling_session_id)).sampler_id
        seconds = min(self.settings.poll_seconds, self.settings.poll_seconds if body.timeout is None else body.timeout)
        found, cursor = await self._futures.ended(owner, body.target.cloned_sampler_id, body.prev_cursor, seconds)
        completions: list[dict[str, Any]] = []
        for each in found:
            state: dict[str, Any] = {"state": "failed" if each.failed else "finished"}
            if not each.failed:
                state["response_payload_uncompressed_size"] = each.size_bytes
            completions.append(state | {"request_id": names.request_id(owner, each.seq_id)})
        return completions, cursor

    async def _pending(self, request_id: str, owner: str, seq_id: int) -> Pending:
        if model := await self.catalog.any_model(owner):
            worker = self.desks.worker(model)
            return Pending(request_id, worker.paused, worker.reason)
        if sampler := await self.catalog.any_sampler(owner):
            call = self.desks.of(sampler.base_model).sampling.find(owner, seq_id)
            if call is not None:
                return Pending(request_id, call.paused, call.reason)
        return Pending(request_id, False, "")

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Stops a sample that nobody waits for; a future that is done, or an operation of a model, goes its way."""
        owner, seq_id = names.split_request_id(request_id)
        if not names.is_sampler(owner):
            return
        desk = self.desks.of((await self.catalog.sampler(tenant, owner)).base_model).sampling
        if (call := desk.find(owner, seq_id)) is not None:
            await desk.cancel(call)

    async def progress(self, model: Model) -> Progress:
        """How far a model is."""
        return await self._futures.progress(model.model_id)


def _check_adamw(config: bodies.OptimizerConfig) -> None:
    if config.type != "adamw":
        raise InvalidRequest(f"optimizer {config.type[:40]!r} is not served, only adamw is", field="optimizer_config")
