"""Parses requests into values and turns values into protos."""

import math
import re
import uuid

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_sandbox.execution import CodeRequest, CodeResult

MAX_CODE_CHARACTERS = 1 << 20

_NAME = re.compile(r"verifications/([0-9a-f]{32})")
_RUN = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_DEFAULT_CODE_SECONDS = 10.0
_DEFAULT_CODE_BYTES = 1 << 30
_LEAST_CODE_BYTES = 16 << 20


def parse_uuid(text: str) -> str:
    """A request id; raises InvalidRequest."""
    try:
        return uuid.UUID(text).hex
    except ValueError:
        raise InvalidRequest(f"request_id must be a UUID, for example {uuid.uuid4()}; got {text[:40]!r}") from None


def parse_run(text: str) -> str:
    """A run's name; raises InvalidRequest."""
    if not _RUN.fullmatch(text):
        raise InvalidRequest(f"run must be 1 to 128 letters, digits or ._/- ; got {text[:40]!r}")
    return text


def parse_name(name: str) -> str:
    """The id in verifications/{verification}; raises InvalidRequest."""
    if (match := _NAME.fullmatch(name)) is None:
        raise InvalidRequest(f"name must be verifications/ and 32 hexadecimal digits, got {name[:60]!r}")
    return match[1]


def parse_code(request: pb.RunCodeRequest, most_seconds: float, most_bytes: int) -> CodeRequest:
    """Limits are refused, never silently lowered."""
    if not request.code or len(request.code) > MAX_CODE_CHARACTERS:
        raise InvalidRequest(f"code must have 1 to {MAX_CODE_CHARACTERS} characters, got {len(request.code)}")
    seconds = request.timeout_seconds or min(_DEFAULT_CODE_SECONDS, most_seconds)
    if not math.isfinite(seconds) or not 0 < seconds <= most_seconds:
        raise InvalidRequest(f"timeout_seconds must be 0 to {most_seconds:.0f}, got {request.timeout_seconds}")
    memory = request.memory_bytes or min(_DEFAULT_CODE_BYTES, most_bytes)
    if not _LEAST_CODE_BYTES <= memory <= most_bytes:
        raise InvalidRequest(f"memory_bytes must be {_LEAST_CODE_BYTES} to {most_bytes}, got {memory}")
    if request.cpu_seconds > most_seconds:
        raise InvalidRequest(f"cpu_seconds must be 0 to {most_seconds:.0f}, got {request.cpu_seconds}")
    return CodeRequest(code=request.code, wall_seconds=seconds, memory_bytes=memory, cpu_seconds=request.cpu_seconds)


def to_code_response(result: CodeResult) -> pb.RunCodeResponse:
    """The end of a run as a message."""
    return pb.RunCodeResponse(
        status=pb.RunCodeResponse.Status.Value(f"STATUS_{result.status.upper()}"),
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        output_truncated=result.output_truncated,
        wall_seconds=result.wall_seconds,
        cpu_seconds=result.cpu_seconds,
    )
