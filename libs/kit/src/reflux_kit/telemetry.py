"""Spans: W3C context across gRPC, HTTP and Redis messages; OTLP export or a local JSON-lines sink."""

import contextvars
import json
import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, SamplingResult, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from reflux_kit.errors import StartupError

log = logging.getLogger(__name__)

_W3C = TraceContextTextMapPropagator()
_MAX_SINK_BYTES = 256 << 20


class _RootSampler(TraceIdRatioBased):
    """Samples new traces by their id, but for the one that `unrecorded` has drawn a lot for in this task."""

    def should_sample(self, parent_context: Any, trace_id: int, *args: Any, **kwargs: Any) -> SamplingResult:
        return super().should_sample(parent_context, 0 if _drawn.get() else trace_id, *args, **kwargs)


_root: _RootSampler | None = None
_drawn: contextvars.ContextVar[bool] = contextvars.ContextVar("drawn", default=False)


class FileExporter(SpanExporter):
    """Appends spans as JSON lines to one file per process; above `max_bytes` it goes on in a new file and keeps one
    old one (`.1.jsonl`), so that the newest spans are there and the disk does not fill up.
    """

    def __init__(self, folder: Path, service: str, max_bytes: int = _MAX_SINK_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{service}-{os.getpid()}.jsonl"
        self._lock = threading.Lock()
        self._service = service
        self._max_bytes = max_bytes
        self._warned = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(self._record(span)) + "\n" for span in spans)
        with self._lock:
            with self._path.open("a") as file:
                file.write(lines)
                full = file.tell() > self._max_bytes
            if full:
                self._roll_over()
        return SpanExportResult.SUCCESS

    def _roll_over(self) -> None:
        self._path.replace(self._path.with_suffix(".1.jsonl"))
        if not self._warned:
            log.warning("%s is full: of its spans only the newest are kept from now on", self._path)
        self._warned = True

    def _record(self, span: ReadableSpan) -> dict[str, object]:
        context = span.get_span_context()
        assert context is not None
        return {
            "service": self._service,
            "name": span.name,
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
            "links": [f"{link.context.trace_id:032x}" for link in span.links],
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "status": span.status.status_code.name,
            "attributes": dict(span.attributes or {}),
        }


def setup(service: str, *, state_dir: str, otlp_endpoint: str, ratio: float) -> TracerProvider | None:
    """Installs the process-wide tracer provider; None when there is neither a collector nor a state folder."""
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter: SpanExporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=True)
    elif state_dir:
        try:
            exporter = FileExporter(Path(state_dir) / "traces", service)
        except OSError as error:
            raise StartupError(f"the state folder {state_dir} cannot be used: {error.strerror}") from None
    else:
        return None
    global _root  # process-wide, as the provider is
    _root = _RootSampler(ratio)
    provider = TracerProvider(resource=Resource({"service.name": service}), sampler=ParentBased(_root))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider


@contextmanager
def span(
    name: str, *, parent: str = "", links: Sequence[str] = (), **attributes: AttributeValue
) -> Iterator[trace.Span]:
    """Times a block. `parent` and `links` are W3C traceparents; without a parent the current context is taken."""
    context = extract(parent) if parent else None
    linked = [trace.Link(_span_context(link)) for link in links if link]
    names = {key.replace("__", "."): value for key, value in attributes.items()}
    tracer = trace.get_tracer("reflux")
    with tracer.start_as_current_span(name, context=context, links=linked, attributes=names) as current:
        yield current


def unrecorded(sent: str) -> str | None:
    """For paths where a span that is not recorded costs too much: draws the lot before there is one, once per task.

    Takes the caller's traceparent, or "" for a new trace. Returns what to send on (perhaps "") when nothing is recorded
    here; None when the block is to be wrapped in `joined` and `span`, which then draw no second lot.
    """
    if _root is None:
        return sent
    if sent:
        return None if sent[-1] in "13579bdf" else sent
    if random.random() < _root.rate:
        _drawn.set(True)
        return None
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-00"


def traceparent() -> str:
    """The current context as a W3C traceparent; empty when nothing is recorded."""
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get("traceparent", "")


def inject(carrier: MutableMapping[str, str]) -> None:
    """Adds the current context to gRPC metadata, HTTP headers or a Redis message."""
    _W3C.inject(carrier)


def extract(parent: str) -> otel_context.Context:
    """The context of a traceparent."""
    return _W3C.extract({"traceparent": parent})


@contextmanager
def joined(carrier: Mapping[str, str]) -> Iterator[None]:
    """Makes the carrier's context the current one inside the block; without a traceparent nothing changes."""
    token = otel_context.attach(_W3C.extract(carrier)) if "traceparent" in carrier else None
    try:
        yield
    finally:
        if token is not None:
            otel_context.detach(token)


def attach(carrier: Mapping[str, str]) -> None:
    """Makes the carrier's context the current one for the rest of this task."""
    if "traceparent" in carrier:
        otel_context.attach(_W3C.extract(dict(carrier)))


def _span_context(parent: str) -> trace.SpanContext:
    return trace.get_current_span(extract(parent)).get_span_context()
