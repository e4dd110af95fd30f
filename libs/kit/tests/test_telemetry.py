"""Where spans go: a collector, a bounded local sink, and the trace of an HTTP caller."""

import contextvars
import os
import re
import subprocess
import sys
from concurrent import futures

import aiohttp
import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased

from reflux_kit import telemetry
from reflux_kit.server import Service, running
from reflux_kit.settings import ServiceSettings

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.received = []

    def Export(self, request, context):
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_an_otlp_collector():
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    code = (
        "from reflux_kit import telemetry\nfrom reflux_kit.settings import ServiceSettings\n"
        "ends = ServiceSettings().otlp_endpoint\n"
        "p = telemetry.setup('demo', state_dir='', otlp_endpoint=ends, ratio=1.0)\n"
        "with telemetry.span('outer', reflux__run='r'): pass\n"
        "p.shutdown()"
    )
    environment = os.environ | {"REFLUX_OTLP_ENDPOINT": f"127.0.0.1:{port}"}
    try:
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    finally:
        server.stop(0)
    (request,) = collector.received
    (resource,) = request.resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.attributes[0].key, span.attributes[0].value.string_value) == ("outer", "reflux.run", "r")
    assert [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"] == ["demo"]


def test_a_full_sink_rolls_over_with_one_warning_and_keeps_the_newest_spans(tmp_path, caplog):
    exporter = telemetry.FileExporter(tmp_path, "demo", max_bytes=2000)
    tracer = TracerProvider().get_tracer("test")
    for number in range(40):
        with tracer.start_as_current_span(f"span-{number}") as span:
            pass
        exporter.export([span])
    old, new = sorted(tmp_path.glob("*.jsonl"))
    assert old.name.endswith(".1.jsonl")
    assert max(path.stat().st_size for path in (old, new)) < 3000
    kept = (old.read_text() + new.read_text()).splitlines()
    assert [f'"span-{number}"' in line for number, line in enumerate(kept, 40 - len(kept))] == [True] * len(kept)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_http_handlers_join_the_trace_of_their_own_request_only():
    seen = []

    async def handler(request):
        seen.append(telemetry.traceparent())
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handler)
    settings = ServiceSettings(http_listen="127.0.0.1:0", drain_seconds=0)
    async with running(Service((), app), settings) as bound, aiohttp.ClientSession(f"http://{bound.http}") as session:
        for headers in ({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, {}):
            async with session.get("/", headers=headers) as response:
                assert response.status == 200
    assert [TRACE in one for one in seen] == [True, False]


def test_a_lot_is_drawn_once_for_a_new_trace_and_a_callers_decision_holds(monkeypatch):
    sampler = telemetry._RootSampler(0.5)
    assert telemetry.unrecorded("") == "", "nothing is recorded without a provider"
    monkeypatch.setattr(telemetry, "_root", sampler)
    tracer = TracerProvider(sampler=ParentBased(sampler)).get_tracer("test")

    def recorded():
        sent = telemetry.unrecorded("")
        if sent is None:
            assert tracer.start_span("a").is_recording()
            return True
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", sent)
        return False

    assert {contextvars.copy_context().run(recorded) for _ in range(200)} == {True, False}
    taken, left = (f"00-{TRACE}-b7ad6b7169203331-0{flag}" for flag in (1, 0))
    assert (telemetry.unrecorded(taken), telemetry.unrecorded(left)) == (None, left)
