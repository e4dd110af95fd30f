"""A trainer with the Tinker API, its peers in this process, and the unmodified SDK against it."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager

import aiohttp
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk_pb
from tinker_peers import VOCABULARY, TinkerGateway, TinkerLearner
from trainer_peers import Scheduler

from reflux.inference_gateway.v1 import inference_gateway_service_pb2_grpc as gateway_grpc
from reflux.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from reflux.trainer.v1 import learner_service_pb2_grpc as learner_grpc
from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_trainer.main import build
from reflux_trainer.settings import TrainerSettings
from reflux_trainer.tinker.fleet import read_base
from reflux_trainer.tinker.settings import TinkerSettings

KEY = "tml-test-key"


class TinkerWorld:
    """Learner, gateway and scheduler of one test; trainers come and go at one address."""

    def __init__(self, valkey_url, folder):
        self.url, self.folder = valkey_url, folder
        self.gateway, self.scheduler = TinkerGateway(), Scheduler()
        self.learner = TinkerLearner(self.gateway)
        self.model_folder = folder / "tiny"
        self.model_folder.mkdir()
        config = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"]}
        (self.model_folder / "config.json").write_text(json.dumps(config))
        self.run = read_base("tiny", self.model_folder).run
        self.peers, self.http, self.port = "", "", 0

    @asynccontextmanager
    async def peers_serving(self):
        mounts = (
            Mount(self.learner, learner_grpc.add_LearnerServiceServicer_to_server, "reflux.trainer.v1.LearnerService"),
            Mount(self.gateway, gateway_grpc.add_InferenceGatewayServiceServicer_to_server, "gateway"),
            Mount(self.scheduler, scheduler_grpc.add_SchedulerServiceServicer_to_server, "scheduler"),
        )
        async with running(Service(mounts), ServiceSettings(drain_seconds=0)) as bound:
            self.peers = bound.grpc
            yield

    @asynccontextmanager
    async def trainer(self, *, secret="", **tinker_settings):
        names = ("scheduler", "gateway", "broker", "sandbox", "checkpoint", "trainer")
        settings = TrainerSettings(
            redis_url=self.url,
            drain_seconds=0,
            state_dir=str(self.folder),
            runs_dir=str(self.folder / "runs"),
            http_listen=f"127.0.0.1:{self.port}",
            stack_secret=secret,
            tinker=TinkerSettings(base_models={"tiny": self.model_folder}, **{"poll_seconds": 0.5} | tinker_settings),
            **{f"{name}_address": self.peers for name in names},
        )
        async with (
            build(settings) as service,
            running(service, settings) as bound,
            open_channel(bound.grpc, settings) as channel,
            self._announcing(TrainerServiceStub(channel)),
        ):
            self.http, self.port = f"http://{bound.http}", int(bound.http.rpartition(":")[2])
            yield self

    @asynccontextmanager
    async def _announcing(self, stub):
        async def announce():
            while True:
                request = pb.RegisterLearnerRequest(
                    run=self.run, address=self.peers, incarnation=self.learner.incarnation
                )
                await stub.RegisterLearner(request)
                await asyncio.sleep(0.05)

        task = asyncio.create_task(announce())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def with_sdk(self, use, **tinker_settings):
        """A trainer, and `use(service)` in a thread of its own: parts of the SDK block whoever calls them."""
        async with self.trainer(**tinker_settings):
            return await self.sdk(use)

    async def sdk(self, use, key=KEY):
        """`use(service)` against the present trainer."""

        def work():
            client = tinker.ServiceClient(base_url=self.http, api_key=key)
            try:
                return asyncio.run(use(client))
            finally:
                client.close("success").result(timeout=20)

        logging.getLogger("tinker").setLevel(logging.ERROR)
        return await asyncio.to_thread(work)

    async def post(self, path, body, key=KEY):
        """Status and document of one plain request."""
        async with (
            aiohttp.ClientSession(headers={"x-api-key": key}) as http,
            http.post(f"{self.http}/api/v1/{path}", json=body) as answer,
        ):
            return answer.status, await answer.json()


def datum(tokens, **inputs):
    """Predicts each next token of a sequence."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


async def train(client, data, loss="cross_entropy", learning_rate=0.1):
    """One pipelined step: the sum of the loss before it."""
    backward = client.forward_backward(data, loss)
    update = client.optim_step(types.AdamParams(learning_rate=learning_rate))
    result = await backward
    await update
    return result


STEP = {"type": "optim_step", "adam_params": {"learning_rate": 0.1, "eps": 1e-8}}
LORA = {"rank": 8, "train_unembed": True, "seed": 1, "a field of later versions": 1}


async def session_of(world, key=KEY):
    status, made = await world.post("create_session", {"tags": [], "sdk_version": "0.38.0"}, key)
    assert status == 200
    return made["session_id"]


async def model_of(world, key=KEY):
    session = await session_of(world, key)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
    _, future = await world.post("create_model", body, key)
    assert await done(world, future, key) == {"type": "create_model", "model_id": f"{session}:train:0"}
    return session, future["model_id"]


async def done(world, future, key=KEY):
    async with asyncio.timeout(20):
        while True:
            status, answer = await world.post("retrieve_future", {"request_id": future["request_id"]}, key)
            assert status == 200, answer
            if answer.get("type") != "try_again":
                return answer


async def forward_backward(world, model, seq_id, tokens=(1, 7, 7)):
    request = sdk_pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = b"".join(int(t).to_bytes(4, "little") for t in tokens[:-1])
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense = b"".join(int(t).to_bytes(8, "little") for t in tokens[1:])
    target.dtype = sdk_pb.DTYPE_INT64
    headers = {"x-api-key": KEY, "content-type": "application/x-protobuf"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{world.http}/api/v1/forward_backward", data=request.SerializeToString()) as answer,
    ):
        return answer.status, await answer.json()


async def sampler_of(world, session):
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    _, made = await world.post("create_sampling_session", body)
    return made["sampling_session_id"]


def sample(sampler, seq_id, **params):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    drawn = {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0} | params
    return {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": drawn}


async def sampled(world, future, key=KEY):
    """Waits for a sample, whose result is no JSON."""
    async with asyncio.timeout(20), aiohttp.ClientSession(headers={"x-api-key": key}) as http:
        while True:
            body = {"request_id": future["request_id"]}
            async with http.post(f"{world.http}/api/v1/retrieve_future", json=body) as answer:
                if answer.content_type != "application/json":
                    return
