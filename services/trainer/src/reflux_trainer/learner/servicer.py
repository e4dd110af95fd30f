"""LearnerService: translates, delegates to the host, holds no policy."""

import uuid
from dataclasses import replace
from typing import Any

from reflux.checkpoint.v1.checkpoint_pb2 import StoredObject
from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceServicer
from reflux_kit.errors import InvalidRequest
from reflux_kit.telemetry import span
from reflux_model.shapes import num_parameters
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options
from reflux_trainer.learner import metrics, parsing, parsing_adapters
from reflux_trainer.learner.adapter_host import AdapterHost
from reflux_trainer.learner.failures import as_service_errors
from reflux_trainer.learner.host import LearnerHost, Saved
from reflux_trainer.learner.ops import BatchFigures, StepFigures
from reflux_trainer.learner.state import StoreAddress

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["LearnerService"].full_name
STATE_OBJECT = "learner-00000.safetensors"
ADAPTER_OBJECT = "adapter-00000.safetensors"


class LearnerServicer(LearnerServiceServicer):
    """One learner process."""

    def __init__(self, host: LearnerHost, s3: S3Options | None = None) -> None:
        self._host, self._adapters = host, AdapterHost(host)
        self._s3 = s3
        self.incarnation = uuid.uuid4().hex

    async def CreateModel(self, request: pb.CreateModelRequest, context: Any) -> pb.CreateModelResponse:
        model_id, source = parsing.parse_model_id(request.model_id), parsing.parse_source(request)
        outlet = parsing.parse_outlet(request)
        with as_service_errors(), span("learner.create", model=model_id):
            session = await self._host.create(model_id, source, outlet)
        metrics.VERSION.set(0)
        return pb.CreateModelResponse(num_parameters=num_parameters(session.learner.config))

    async def ForwardBackward(self, request: pb.ForwardBackwardRequest, context: Any) -> pb.ForwardBackwardResponse:
        model_id, op_id = parsing.parse_model_id(request.model_id), parsing.parse_op_id(request.op_id)
        loss = parsing.parse_loss(request.loss)
        groups = parsing_adapters.parse_batch(request, self._host.require(model_id).learner.config)
        with as_service_errors(), span("learner.forward_backward", op_id=op_id, groups=len(groups)):
            if request.adapter:
                adapter = parsing.parse_adapter(request.adapter)
                figures = await self._adapters.forward_backward(model_id, adapter, op_id, groups, loss)
            else:
                limit, outputs = request.micro_batch_completions, bool(request.datums)
                figures = await self._host.operate(
                    model_id,
                    op_id,
                    "forward_backward",
                    lambda learner: learner.forward_backward(groups, loss, limit, outputs=outputs),
                )
        assert isinstance(figures, BatchFigures)
        _observe_batch(figures)
        return pb.ForwardBackwardResponse(
            loss=figures.loss,
            tokens=figures.tokens,
            entropy=figures.entropy,
            kl_sample_train=figures.kl_sample_train,
            max_logprob_gap=figures.max_logprob_gap,
            clip_fraction=figures.clip_fraction,
            kl_reference=figures.kl_reference,
            value_loss=figures.value_loss,
            explained_variance=figures.explained_variance,
            seconds=figures.seconds,
            outputs=_outputs(figures) if request.datums else (),
        )

    async def OptimStep(self, request: pb.OptimStepRequest, context: Any) -> pb.OptimStepResponse:
        model_id, op_id = parsing.parse_model_id(request.model_id), parsing.parse_op_id(request.op_id)
        step = parsing.parse_step(request)
        with as_service_errors(), span("learner.optim_step", op_id=op_id):
            if request.adapter:
                adapter = parsing.parse_adapter(request.adapter)
                figures = await self._adapters.optim_step(model_id, adapter, op_id, step)
            else:
                figures = await self._host.operate(
                    model_id, op_id, "optim_step", lambda learner: learner.optim_step(step)
                )
        assert isinstance(figures, StepFigures)
        metrics.OPERATION_SECONDS.labels("optim_step").observe(figures.seconds)
        if not request.adapter:
            metrics.VERSION.set(figures.version)
        metrics.REFUSED_STEPS.inc(not figures.applied)
        return pb.OptimStepResponse(
            grad_norm=figures.grad_norm, version=figures.version, applied=figures.applied, seconds=figures.seconds
        )

    async def Forward(self, request: pb.ForwardRequest, context: Any) -> pb.ForwardResponse:
        model_id = parsing.parse_model_id(request.model_id)
        adapter = parsing.parse_adapter(request.adapter) if request.adapter else ""
        groups = parsing_adapters.parse_batch(request, self._host.require(model_id).learner.config)
        loss = parsing.parse_loss(request.loss) if request.HasField("loss") else None
        with as_service_errors(), span("learner.forward", groups=len(groups)):
            figures = await self._adapters.rescore(
                model_id, adapter, groups, loss, reference=request.reference, values=request.values
            )
        answer = pb.ForwardResponse(
            groups=request.groups,
            outputs=_outputs(figures) if request.datums else (),
            loss=figures.loss,
            seconds=figures.seconds,
        )
        rows = iter(figures.logprobs)
        for group in answer.groups:
            for completion in group.completions:
                completion.behaviour_logprobs[:] = next(rows)
        return answer

    async def PublishWeights(self, request: pb.PublishWeightsRequest, context: Any) -> pb.PublishWeightsResponse:
        model_id = parsing.parse_model_id(request.model_id)
        order = parsing.parse_publish(request, self._host.require(model_id).learner.config)
        if request.merged_objects:
            key = parsing_adapters.parse_state_key(request.merged_objects, ADAPTER_OBJECT, "merged_objects")
            order = replace(order, merged_from=(self._store(request.store_url), key))
        with as_service_errors():
            published = await self._host.publish(model_id, order)
        metrics.PUBLISH_SECONDS.observe(published.stage_seconds + published.sync_seconds)
        return pb.PublishWeightsResponse(
            version=published.version,
            epoch=published.epoch,
            stage_seconds=published.stage_seconds,
            sync_seconds=published.sync_seconds,
            bytes=published.bytes,
            fingerprint=published.fingerprint,
        )

    async def SaveState(self, request: pb.SaveStateRequest, context: Any) -> pb.SaveStateResponse:
        model_id = parsing.parse_model_id(request.model_id)
        self._host.require(model_id)
        prefix = request.prefix.strip("/")
        if not prefix:
            raise InvalidRequest("prefix is required: where the objects of the checkpoint go")
        with as_service_errors(), span("learner.save", prefix=prefix):
            saved = await self._save(model_id, request, prefix)
        metrics.SAVE_PAUSE_SECONDS.observe(saved.pause_seconds)
        return pb.SaveStateResponse(
            objects=[
                StoredObject(key=receipt.key, size_bytes=receipt.size_bytes, checksum=receipt.checksum)
                for receipt in saved.receipts
            ],
            op_id=saved.op_id,
            version=saved.version,
            pause_seconds=saved.pause_seconds,
            seconds=saved.seconds,
        )

    async def _save(self, model_id: str, request: pb.SaveStateRequest, prefix: str) -> Saved:
        store = self._store(request.store_url)
        if not request.adapter:
            address = StoreAddress(request.store_url, self._s3)
            return await self._host.save(model_id, address, f"{prefix}/{STATE_OBJECT}")
        adapter, key = parsing.parse_adapter(request.adapter), f"{prefix}/{ADAPTER_OBJECT}"
        return await self._adapters.save(model_id, adapter, store, key, weights_only=request.weights_only)

    async def LoadState(self, request: pb.LoadStateRequest, context: Any) -> pb.LoadStateResponse:
        model_id = parsing.parse_model_id(request.model_id)
        if request.adapter:
            return await self._load_adapter(model_id, parsing.parse_adapter(request.adapter), request)
        source, outlet = parsing.parse_source(request), parsing.parse_outlet(request)
        key = parsing_adapters.parse_state_key(request.objects, STATE_OBJECT)
        with as_service_errors(), span("learner.load", key=key):
            self._store(request.store_url)
            address = StoreAddress(request.store_url, self._s3)
            session = await self._host.load(model_id, source, outlet, address, key)
        metrics.VERSION.set(session.learner.version)
        return pb.LoadStateResponse(op_id=session.journal.last, version=session.learner.version)

    async def _load_adapter(self, model_id: str, adapter: str, request: pb.LoadStateRequest) -> pb.LoadStateResponse:
        key = parsing_adapters.parse_state_key(request.objects, ADAPTER_OBJECT)
        if request.op_id < 0:
            raise InvalidRequest(f"op_id must be 0 or more, got {request.op_id}", field="op_id")
        stored = self._store(request.store_url), key
        with as_service_errors(), span("learner.load", key=key):
            loaded = await self._adapters.load(
                model_id, adapter, stored, request.op_id, weights_only=request.weights_only, epoch=request.epoch
            )
        return pb.LoadStateResponse(op_id=loaded.journal.last, version=loaded.version)

    async def CreateAdapter(self, request: pb.CreateAdapterRequest, context: Any) -> pb.CreateAdapterResponse:
        model_id, name = parsing.parse_model_id(request.model_id), parsing.parse_adapter(request.adapter)
        spec = parsing_adapters.parse_lora(request)
        with as_service_errors(), span("learner.create_adapter", adapter=name):
            adapter = await self._adapters.create(model_id, name, spec, request.seed)
        return pb.CreateAdapterResponse(num_parameters=sum(tensor.numel() for tensor in adapter.params.values()))

    async def DropAdapter(self, request: pb.DropAdapterRequest, context: Any) -> pb.DropAdapterResponse:
        model_id, name = parsing.parse_model_id(request.model_id), parsing.parse_adapter(request.adapter)
        await self._adapters.drop(model_id, name)
        return pb.DropAdapterResponse()

    async def GetLearner(self, request: pb.GetLearnerRequest, context: Any) -> pb.GetLearnerResponse:
        session = self._host.session
        if session is None:
            return pb.GetLearnerResponse(incarnation=self.incarnation)
        return pb.GetLearnerResponse(
            model_id=session.model_id,
            op_id=session.journal.last,
            version=session.learner.version,
            incarnation=self.incarnation,
            epoch=session.publisher.epoch,
            adapters=[
                pb.AdapterState(name=name, op_id=adapter.journal.last, version=adapter.version)
                for name, adapter in session.adapters.items()
            ],
        )

    def _store(self, url: str) -> ObjectStore:
        try:
            return open_store(url, self._s3)
        except ValueError as error:
            raise InvalidRequest(f"store_url: {error}") from None


def _outputs(figures: BatchFigures) -> list[pb.DatumOutput]:
    return [pb.DatumOutput(logprobs=row) for row in figures.logprobs]


def _observe_batch(figures: BatchFigures) -> None:
    metrics.OPERATION_SECONDS.labels("forward_backward").observe(figures.seconds)
    metrics.TOKENS.inc(figures.tokens)
    metrics.LOGPROB_GAP.set(figures.max_logprob_gap)
    metrics.CLIP_FRACTION.set(figures.clip_fraction)
    metrics.ENTROPY.set(figures.entropy)
