"""Log lines: time, level, service, trace id, message; text for people or JSON for collectors."""

import json
import logging
import sys
import time

from opentelemetry import trace


class _Formatter(logging.Formatter):
    def __init__(self, service: str, as_json: bool) -> None:
        super().__init__()
        self._service = service
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        context = trace.get_current_span().get_span_context()
        trace_id = f"{context.trace_id:032x}" if context.is_valid else ""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._json:
            fields = {"time": stamp, "level": record.levelname, "service": self._service, "logger": record.name}
            return json.dumps(fields | {"trace_id": trace_id, "message": text})
        return f"{stamp} {record.levelname:7} {self._service} {record.name}: {text}" + (
            f" trace={trace_id}" if trace_id else ""
        )


def setup(service: str, as_json: bool = False) -> None:
    """Sends all log records of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service, as_json))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
