"""A real gateway in this process, and fake replicas that die, stall or refuse on command."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import grpc
from aiohttp import web

from reflux.common.v1.common_pb2 import Sample, SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2, engine_service_pb2_grpc
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux_inference_gateway.main import build
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.server import running


class FakeEngine(engine_service_pb2_grpc.EngineServiceServicer):
    """Answers `delivered` samples, then does what `then` says."""

    def __init__(self, then="finish", delivered=0):
        self.then, self.delivered = then, delivered
        self.requests = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        count = request.num_samples if self.then == "finish" else self.delivered
        for index in range(count):
            sample = Sample(index=index, token_ids=[7], logprobs=[-0.5], finish_reason="stop")
            yield engine_service_pb2.GenerateResponse(samples=[sample])
        if self.then == "die":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        if self.then == "full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "9 samples wait")
        if self.then == "hang":
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()


@asynccontextmanager
async def engine_server(engine):
    server = grpc.aio.server()
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def http_server(handler):
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Gateway:
    """A running gateway with its stub and HTTP session."""

    def __init__(self, stub, http, address):
        self.stub, self.http, self.address = stub, http, address

    async def register(self, name, *, model="m", version=0, grpc_address="", http_url="", engine=""):
        replica = Replica(
            name=f"replicas/{name}",
            model_id=model,
            version=version,
            grpc_address=grpc_address,
            http_url=http_url,
            engine=engine,
            role=Replica.ROLE_BOTH,
        )
        await self.stub.RegisterReplica(pb.RegisterReplicaRequest(replica=replica), timeout=5)
        return replica


@asynccontextmanager
async def gateway(**fields):
    """Idle replicas take requests in the order in which they registered, unless `routing` says otherwise."""
    defaults = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0", "drain_seconds": 0, "startup_grace_seconds": 0}
    settings = GatewaySettings(**{**defaults, "routing": "least_loaded", **fields})
    async with (
        build(settings) as service,
        running(service, settings) as bound,
        grpc.aio.insecure_channel(bound.grpc) as channel,
        aiohttp.ClientSession(f"http://{bound.http}") as session,
    ):
        yield Gateway(InferenceGatewayServiceStub(channel), session, bound.grpc)


def group(request_id="r", n=2, **fields):
    return pb.GenerateGroupRequest(
        request_id=request_id,
        model_id="m",
        prompt_token_ids=[1],
        num_samples=n,
        sampling=SamplingParams(max_tokens=4),
        **fields,
    )


async def answers(call, received=None):
    received = [] if received is None else received
    async for response in call:
        received.append(response)
    return received


async def weather(made, draw):
    """Pauses and resumes the model `m`, and lets replicas that were lost report again, until it is cancelled."""
    while True:
        await asyncio.sleep(0)
        match draw.randrange(4):
            case 0:
                made.fleet.pause("m")
            case 1:
                made.fleet.resume("m")
            case _:
                made.table.heartbeat(draw.choice(made.table.entries()).info, made.clock())
        made.changes.notify()
