"""The trace of one request at the door."""

from collections.abc import Iterator
from contextlib import contextmanager

from reflux_inference_gateway.http.exchange import Request
from reflux_inference_gateway.http.headers import Headers
from reflux_kit import telemetry


@contextmanager
def traced(request: Request, model: str) -> Iterator[Headers]:
    """Times the block as a span under the client's trace, if that is to be recorded; yields the headers to send on in
    place of the client's."""
    sent = (request.header(b"traceparent") or b"").decode("latin-1")
    passed_on = telemetry.unrecorded(sent)
    if passed_on is not None:
        yield [] if passed_on == sent else [(b"traceparent", passed_on.encode())]
        return
    path = request.path.decode("latin-1")
    with telemetry.joined(_carrier(request)), telemetry.span("gateway.http", model=model, path=path):
        carrier: dict[str, str] = {}
        telemetry.inject(carrier)
        yield [(name.encode(), value.encode()) for name, value in carrier.items()]


def _carrier(request: Request) -> dict[str, str]:
    """The trace context that the client sent."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in request.headers
        if name in (b"traceparent", b"tracestate")
    }
