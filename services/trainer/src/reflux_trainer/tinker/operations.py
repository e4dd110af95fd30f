"""What each operation of a model asks of the learner, and its result. One function per kind; order is the worker's."""

import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.errors import InvalidRequest, NotFound
from reflux_trainer.oplog import COMPUTE_SECONDS
from reflux_trainer.tinker import wire
from reflux_trainer.tinker.blobs import Blobs, folder_of
from reflux_trainer.tinker.bodies import AdamParams, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler, parse
from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.futures import JSON, PROTOBUF, Outcome
from reflux_trainer.tinker.names import CheckpointUri, checked_name, sampler_id
from reflux_trainer.tinker.records import Checkpoint, Model, Progress, Sampler, Weights

Call = Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[Any]]
"""Sends one call to the learner; generated stubs have no type that an alias could name."""
_STATE_SECONDS = 300.0
CREATE, FORWARD_BACKWARD, FORWARD, OPTIM, SAVE, SAMPLER, LOAD = "CFGOSPL"
"""Kinds, one character each, as the log keeps them."""
CHANGES_STATE = frozenset({FORWARD_BACKWARD, OPTIM, LOAD})
_COMMON = {"beta1", "beta2", "eps", "learning_rate", "weight_decay"}


@dataclass(frozen=True)
class Done:
    """An operation's outcome and what it changes."""

    outcome: Outcome
    op_id: int = 0
    """The learner's number of it when it changed the adapter, else 0."""
    saved: Weights | None = None
    """A recovery state that covers it."""


class Operations:
    """The operations of one model against a learner that holds its adapter."""

    def __init__(self, model: Model, run: str, catalog: Catalog, blobs: Blobs) -> None:
        """`run` is the base's model id at the learner."""
        self._model, self._run, self._catalog, self._blobs = model, run, catalog, blobs

    async def execute(self, kind: str, payload: bytes, seq_id: int, op_id: int, call: Call) -> Done:
        """Runs one operation; `op_id` is its number if it changes the adapter.

        Raises InvalidRequest or NotFound for a request at fault, and what `call` raises.
        """
        match kind:
            case "C":
                return await self._create(call)
            case "F":
                return await self._forward_backward(payload, op_id, call)
            case "G":
                return await self._forward(payload, call)
            case "O":
                return await self._optim_step(payload, op_id, call)
            case "S":
                return await self._save(payload, seq_id, call)
            case "P":
                return await self._save_for_sampler(payload, seq_id, call)
            case "L":
                return await self._load(payload, op_id, call)
        raise AssertionError(f"unknown kind {kind!r}")

    async def _create(self, call: Call) -> Done:
        await call(lambda stub: stub.CreateAdapter(self._creation(), timeout=_STATE_SECONDS))
        return Done(_json({"type": "create_model", "model_id": self._model.model_id}))

    def _creation(self) -> pb.CreateAdapterRequest:
        shape = self._model.shape
        return pb.CreateAdapterRequest(
            model_id=self._run,
            adapter=self._model.adapter,
            rank=shape.rank,
            train_attention=shape.train_attn,
            train_mlp=shape.train_mlp,
            train_unembed=shape.train_unembed,
            seed=shape.seed,
        )

    async def _forward_backward(self, payload: bytes, op_id: int, call: Call) -> Done:
        batch = self._batch(payload, op_id)
        answer = await call(lambda stub: stub.ForwardBackward(batch, timeout=COMPUTE_SECONDS))
        figures = {"clip_fraction:mean": answer.clip_fraction}
        body = wire.render_forward_backward(answer.loss, answer.outputs, figures)
        return Done(Outcome(body, PROTOBUF), op_id)

    def _batch(self, payload: bytes, op_id: int) -> pb.ForwardBackwardRequest:
        request = wire.parse_forward_backward(payload)
        return pb.ForwardBackwardRequest(
            op_id=op_id,
            model_id=self._run,
            adapter=self._model.adapter,
            datums=wire.learner_batch(request),
            loss=wire.loss_config(request),
        )

    async def _forward(self, payload: bytes, call: Call) -> Done:
        request = wire.parse_forward_backward(payload)
        forward = pb.ForwardRequest(
            model_id=self._run,
            adapter=self._model.adapter,
            datums=wire.learner_batch(request),
            loss=wire.loss_config(request),
        )
        answer = await call(lambda stub: stub.Forward(forward, timeout=COMPUTE_SECONDS))
        return Done(Outcome(wire.render_forward_backward(answer.loss, answer.outputs, {}), PROTOBUF))

    async def _optim_step(self, payload: bytes, op_id: int, call: Call) -> Done:
        step = self._step(payload, op_id)
        answer = await call(lambda stub: stub.OptimStep(step, timeout=COMPUTE_SECONDS))
        if not answer.applied or not math.isfinite(answer.grad_norm):
            text = "the loss or its gradient is not finite: the gradient was dropped, the weights are as before"
            return Done(Outcome(text.encode(), JSON, "user"), op_id)
        return Done(_json({"metrics": {"grad_norm": answer.grad_norm}}), op_id)

    def _step(self, payload: bytes, op_id: int) -> pb.OptimStepRequest:
        body = parse(OptimStep, payload)
        if body.optimizer_params is not None:
            family = body.optimizer_params.type
            raise InvalidRequest(f"optimizer {family[:40]!r} is not served, only adamw is", field="optimizer_params")
        params = body.adam_params or AdamParams()
        return pb.OptimStepRequest(
            op_id=op_id,
            model_id=self._run,
            adapter=self._model.adapter,
            max_grad_norm=params.grad_clip_norm,
            **params.model_dump(include=_COMMON),
        )

    async def _save(self, payload: bytes, seq_id: int, call: Call) -> Done:
        body = parse(SaveWeights, payload)
        uri = CheckpointUri(self._model.model_id, "training", checked_name(body.path, seq_id))
        if not body.overwrite:
            await self._check_free(uri, seq_id)
        weights = await self.save_state("weights", call)
        await self._keep(uri, seq_id, weights, body)
        return Done(_json({"type": "save_weights", "path": str(uri)}))

    async def _save_for_sampler(self, payload: bytes, seq_id: int, call: Call) -> Done:
        body = parse(SaveWeightsForSampler, payload)
        if body.sampling_session_seq_id is None:
            uri = CheckpointUri(self._model.model_id, "sampler", checked_name(body.path, seq_id))
            await self._check_free(uri, seq_id)
            weights = await self.save_state("sampler", call, weights_only=True)
            await self._keep(uri, seq_id, weights, body)
            return Done(_json({"type": "save_weights_for_sampler", "path": str(uri)}))
        weights = await self.save_state("sampler", call, weights_only=True)
        name = sampler_id(self._model.session_id, body.sampling_session_seq_id)
        inflight = body.kind == "inflight"
        if inflight and (before := await self._catalog.set_newest(self._model.model_id, weights)):
            await self._blobs.drop(key for key, *_ in before.objects)
        sampler = Sampler(
            sampler_id=name,
            session_id=self._model.session_id,
            tenant=self._model.tenant,
            base_model=self._model.base_model,
            kind=body.kind,
            model_id=self._model.model_id,
            weights={} if inflight else asdict(weights),
            created_at=time.time(),
        )
        await self._catalog.add_sampler(sampler)
        return Done(_json({"type": "save_weights_for_sampler", "sampling_session_id": name}))

    async def _check_free(self, uri: CheckpointUri, seq_id: int) -> None:
        try:
            found = await self._catalog.checkpoint(self._model.tenant, str(uri))
        except NotFound:
            return
        if found.seq_id == seq_id:
            return  # this operation's own, whose end a crash left unrecorded: it is replaced
        raise InvalidRequest(f"{uri} exists; choose another name, or overwrite a training checkpoint", field="path")

    async def _keep(
        self, uri: CheckpointUri, seq_id: int, weights: Weights, body: SaveWeights | SaveWeightsForSampler
    ) -> None:
        now = time.time()
        checkpoint = Checkpoint(
            uri=str(uri),
            model_id=self._model.model_id,
            kind=uri.kind,
            checkpoint_id=uri.checkpoint_id,
            base_model=self._model.base_model,
            lora=dict(self._model.lora),
            weights=asdict(weights),
            created_at=now,
            seq_id=seq_id,
            expires_at=now + body.ttl_seconds if body.ttl_seconds else None,
            user_metadata=body.user_metadata,
        )
        if before := await self._catalog.add_checkpoint(checkpoint):
            await self._blobs.drop(key for key, *_ in before.stored.objects)

    async def save_state(self, what: str, call: Call, *, weights_only: bool = False) -> Weights:
        """Saves the adapter below a prefix of its own, which no repetition shares."""
        request = pb.SaveStateRequest(
            model_id=self._run,
            adapter=self._model.adapter,
            store_url=self._blobs.url,
            prefix=f"{folder_of(self._model.model_id)}/{what}/{uuid4().hex}",
            weights_only=weights_only,
        )
        answer = await call(lambda stub: stub.SaveState(request, timeout=_STATE_SECONDS))
        return Weights.of(answer.objects)

    async def _load(self, payload: bytes, op_id: int, call: Call) -> Done:
        body = parse(LoadWeights, payload)
        checkpoint = await self._catalog.readable_checkpoint(self._model.tenant, body.path)
        if checkpoint.base_model != self._model.base_model:
            raise InvalidRequest(f"{body.path} is of base model {checkpoint.base_model!r}", field="path")
        if checkpoint.lora["rank"] != self._model.shape.rank:
            raise InvalidRequest(f"{body.path} has rank {checkpoint.lora['rank']}, not the model's", field="path")
        if body.optimizer and checkpoint.kind != "training":
            raise InvalidRequest(f"{body.path} holds no optimizer: it is of the sampler's kind", field="optimizer")
        weights_only = not body.optimizer
        request = self._loading(checkpoint.stored, op_id, weights_only=weights_only)
        await call(lambda stub: stub.LoadState(request, timeout=_STATE_SECONDS))
        saved = await self.save_state("recovery", call)
        return Done(_json({"type": "load_weights", "path": body.path}), op_id, saved)

    def _loading(self, weights: Weights, op_id: int, *, weights_only: bool = False) -> pb.LoadStateRequest:
        return pb.LoadStateRequest(
            model_id=self._run,
            adapter=self._model.adapter,
            store_url=self._blobs.url,
            objects=weights.messages,
            weights_only=weights_only,
            op_id=op_id,
        )

    async def recover(self, progress: Progress, logged: list[tuple[int, str, bytes]], call: Call) -> None:
        """Brings a learner without the adapter to `progress`: the saved state, then the logged operations."""
        drop = pb.DropAdapterRequest(model_id=self._run, adapter=self._model.adapter)
        await call(lambda stub: stub.DropAdapter(drop, timeout=_STATE_SECONDS))
        if progress.saved_op_id:
            loading = self._loading(progress.recovery_weights, progress.saved_op_id)
            await call(lambda stub: stub.LoadState(loading, timeout=_STATE_SECONDS))
        else:
            await call(lambda stub: stub.CreateAdapter(self._creation(), timeout=_STATE_SECONDS))
        for op_id, kind, payload in logged:
            if kind == FORWARD_BACKWARD:
                batch = self._batch(payload, op_id)
                await call(lambda stub, batch=batch: stub.ForwardBackward(batch, timeout=COMPUTE_SECONDS))
            else:
                step = self._step(payload, op_id)
                await call(lambda stub, step=step: stub.OptimStep(step, timeout=COMPUTE_SECONDS))

    def moved(self, progress: Progress, seq_id: int, done: Done) -> Progress:
        """The progress behind an operation."""
        after = replace(progress, next_seq=seq_id + 1, op_id=done.op_id or progress.op_id, touched_at=time.time())
        if done.saved is None:
            return after
        return replace(after, saved_op_id=done.op_id, recovery=asdict(done.saved))


def _json(document: dict[str, object]) -> Outcome:
    return Outcome(json.dumps(document).encode())
