"""A learner and a gateway around the same bigram softmax model: 16 tokens, an adapter is a matrix of logits."""

import json
import uuid
from dataclasses import dataclass, field

import grpc
import numpy as np

from reflux.checkpoint.v1.checkpoint_pb2 import StoredObject
from reflux.common.v1 import common_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway
from reflux.inference_gateway.v1 import inference_gateway_service_pb2_grpc as gateway_grpc
from reflux.inference_gateway.v1 import replica_pb2
from reflux.trainer.v1 import learner_service_pb2 as learner
from reflux.trainer.v1 import learner_service_pb2_grpc as learner_grpc
from reflux_kit.errors import InvalidRequest, NotFound, WrongState
from reflux_storage.stores import open_store

VOCABULARY = 16


def log_softmax(weights, rows):
    logits = weights[rows]
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@dataclass
class Adapter:
    weights: np.ndarray = field(default_factory=lambda: np.zeros((VOCABULARY, VOCABULARY)))
    gradient: np.ndarray = field(default_factory=lambda: np.zeros((VOCABULARY, VOCABULARY)))
    moments: np.ndarray = field(default_factory=lambda: np.zeros((2, VOCABULARY, VOCABULARY)))
    steps: int = 0
    op_id: int = 0
    answers: dict = field(default_factory=dict)

    def dump(self, weights_only):
        document = {"weights": self.weights.tolist()}
        if not weights_only:
            document |= {"gradient": self.gradient.tolist(), "moments": self.moments.tolist(), "steps": self.steps}
        return json.dumps(document).encode()

    @classmethod
    def load(cls, raw, weights_only):
        document = json.loads(raw)
        made = cls(weights=np.array(document["weights"]))
        if not weights_only:
            made.gradient, made.moments = np.array(document["gradient"]), np.array(document["moments"])
            made.steps = document["steps"]
        return made

    def backward(self, datum, loss, update):
        inputs, targets = list(datum.token_ids), list(datum.target_token_ids)
        arrays = {array.name: np.array(array.values) for array in datum.arrays}
        rows = log_softmax(self.weights, inputs)
        logprobs = rows[np.arange(len(targets)), targets]
        weights = arrays.get("weights", np.ones(len(targets)))
        if loss.name != "cross_entropy":
            ratio = np.exp(logprobs - arrays.get("logprobs", logprobs))
            weights = weights * ratio * arrays.get("advantages", np.ones(len(targets)))
            value = -weights.sum()
        else:
            value = -(weights * logprobs).sum()
        if update:
            one_hot = np.zeros_like(rows)
            one_hot[np.arange(len(targets)), targets] = 1
            np.add.at(self.gradient, inputs, -(weights[:, None] * (one_hot - np.exp(rows))))
        return float(value), logprobs

    def step(self, request):
        self.steps += 1
        betas = np.array([request.beta1, request.beta2])[:, None, None]
        self.moments = betas * self.moments + (1 - betas) * np.stack([self.gradient, self.gradient**2])
        first, second = self.moments / (1 - betas**self.steps)
        self.weights = self.weights - request.learning_rate * first / (np.sqrt(second) + request.eps)
        norm = float(np.linalg.norm(self.gradient))
        self.gradient = np.zeros_like(self.gradient)
        return norm


class TinkerLearner(learner_grpc.LearnerServiceServicer):
    """Adapters in memory. `die()` is what kill -9 does: everything is forgotten and the incarnation is another."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.executed = []
        self.hold = None
        self.die()

    def die(self):
        self.incarnation = uuid.uuid4().hex
        self.model_id = ""
        self.adapters = {}

    async def CreateModel(self, request, context):
        self.model_id = request.model_id
        return learner.CreateModelResponse(num_parameters=1)

    async def GetLearner(self, request, context):
        states = [learner.AdapterState(name=n, op_id=a.op_id, version=a.steps) for n, a in self.adapters.items()]
        return learner.GetLearnerResponse(model_id=self.model_id, incarnation=self.incarnation, adapters=states)

    async def CreateAdapter(self, request, context):
        if request.rank > 64:
            raise InvalidRequest("rank is larger than the model")
        self.adapters[request.adapter] = Adapter()
        return learner.CreateAdapterResponse(num_parameters=1)

    async def DropAdapter(self, request, context):
        self.adapters.pop(request.adapter, None)
        return learner.DropAdapterResponse()

    def _adapter(self, request):
        if request.model_id != self.model_id or request.adapter not in self.adapters:
            raise NotFound(f"adapter {request.adapter!r} is not loaded")
        return self.adapters[request.adapter]

    def _once(self, request, compute):
        adapter = self._adapter(request)
        if request.op_id in adapter.answers:
            return adapter.answers[request.op_id]
        if request.op_id != adapter.op_id + 1:
            raise WrongState(f"operation {request.op_id} does not follow {adapter.op_id}")
        answer = compute(adapter)
        adapter.op_id, adapter.answers[request.op_id] = request.op_id, answer
        self.executed.append((request.adapter, request.op_id))
        return answer

    async def ForwardBackward(self, request, context):
        if self.hold is not None:
            await self.hold.wait()
        if any(len(datum.token_ids) > 64 for datum in request.datums):
            raise InvalidRequest("datums[0] exceeds the context of 64")
        assert request.loss.aggregation == "sum"

        def compute(adapter):
            results = [adapter.backward(datum, request.loss, True) for datum in request.datums]
            outputs = [learner.DatumOutput(logprobs=logprobs) for _, logprobs in results]
            return learner.ForwardBackwardResponse(loss=sum(loss for loss, _ in results), outputs=outputs)

        return self._once(request, compute)

    async def Forward(self, request, context):
        adapter = self._adapter(request)
        results = [adapter.backward(datum, request.loss, False) for datum in request.datums]
        outputs = [learner.DatumOutput(logprobs=logprobs) for _, logprobs in results]
        return learner.ForwardResponse(loss=sum(loss for loss, _ in results), outputs=outputs)

    async def OptimStep(self, request, context):
        def compute(adapter):
            norm = adapter.step(request)
            return learner.OptimStepResponse(grad_norm=norm, version=adapter.steps, applied=True)

        return self._once(request, compute)

    async def SaveState(self, request, context):
        data = self._adapter(request).dump(request.weights_only)
        key = f"{request.prefix}/adapter"
        open_store(request.store_url).put_create_only(key, data)
        return learner.SaveStateResponse(objects=[StoredObject(key=key, size_bytes=len(data), checksum="0")])

    async def LoadState(self, request, context):
        raw, _ = open_store(request.store_url).get(request.objects[0].key)
        adapter = self.adapters[request.adapter] = Adapter.load(raw, request.weights_only)
        adapter.op_id = request.op_id
        return learner.LoadStateResponse(op_id=request.op_id)

    async def PublishWeights(self, request, context):
        weights = np.zeros((VOCABULARY, VOCABULARY))
        if request.merged_objects:
            raw, _ = open_store(request.store_url).get(request.merged_objects[0].key)
            weights = Adapter.load(raw, True).weights
        _weights, version = self.fleet.served.get(request.publish_as, (None, 0))
        assert request.version > version
        self.fleet.served[request.publish_as] = weights, request.version
        self.fleet.publishes += 1
        return learner.PublishWeightsResponse(version=request.version)


class TinkerGateway(gateway_grpc.InferenceGatewayServiceServicer):
    """Samples from what was published under a model id; `hold` keeps all requests back."""

    def __init__(self):
        self.served = {}
        self.publishes = 0
        self.groups = []
        self.running = 0
        self.hold = None

    async def ListReplicas(self, request, context):
        ready = replica_pb2.Replica.STATE_READY
        return gateway.ListReplicasResponse(replicas=[replica_pb2.Replica(name="replicas/r0", state=ready)])

    async def GenerateGroup(self, request, context):
        self.groups.append(request.num_samples)
        self.running += 1
        try:
            if self.hold is not None:
                await self.hold.wait()
            weights, version = self.served[request.model_id]
            if request.version not in (0, version):
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "VERSION_GONE")
            for index in range(request.num_samples):
                yield gateway.GenerateGroupResponse(sample=self._sample(request, weights, index))
        finally:
            self.running -= 1

    def _sample(self, request, weights, index):
        sampling = request.sampling
        random = np.random.default_rng([sampling.seed, index])
        previous, tokens, logprobs, reason, tops = request.prompt_token_ids[-1], [], [], "length", []
        while len(tokens) < sampling.max_tokens:
            row = log_softmax(weights, previous)
            previous = int(random.choice(VOCABULARY, p=np.exp(row))) if sampling.temperature else int(row.argmax())
            tokens.append(previous)
            logprobs.append(row[previous])
            best = np.argsort(-row)[: sampling.top_logprobs]
            tops.append(common_pb2.TokenScores(token_ids=best, logprobs=row[best]))
            if previous in sampling.stop_token_ids:
                reason = "stop"
                break
        sample = common_pb2.Sample(index=index, token_ids=tokens, logprobs=logprobs, finish_reason=reason)
        if sampling.top_logprobs:
            sample.top_logprobs.extend(tops)
        if sampling.HasField("prompt_logprobs"):
            for before, token in zip(request.prompt_token_ids, request.prompt_token_ids[1:], strict=False):
                row = log_softmax(weights, before)
                best = [token, *(each for each in np.argsort(-row)[: sampling.prompt_logprobs] if each != token)]
                sample.prompt_scores.add(token_ids=best, logprobs=row[best])
        return sample
