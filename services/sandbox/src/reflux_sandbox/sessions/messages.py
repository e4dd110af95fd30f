"""Parses requests of sessions into values and turns values into protos."""

import math
import re

from reflux.sandbox.v1 import session_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_sandbox.messages import MAX_CODE_CHARACTERS, parse_run, parse_uuid
from reflux_sandbox.sessions.session import ExecResult, Session, SessionLimits

MOST_WRITE_BYTES = 3 << 20
MOST_READ_BYTES = 2 << 20
_MOST_PATH_CHARACTERS = 512
_NAME = re.compile(r"sessions/[0-9a-f]{32}")
_IDLE_SECONDS, _TTL_SECONDS, _EXEC_SECONDS = 300.0, 3600.0, 10.0
_MOST_SECONDS = 86400.0
_MEMORY_BYTES, _LEAST_MEMORY_BYTES = 1 << 30, 16 << 20
_READ_BYTES = 1 << 20


def _seconds(field: str, value: float, default: float, most: float) -> float:
    if not math.isfinite(value) or not 0 <= value <= most:
        raise InvalidRequest(f"{field} must be 0 to {most:g}, got {value}")
    return value or min(default, most)


def parse_create(request: pb.CreateSessionRequest, most_bytes: int) -> tuple[str, str, SessionLimits]:
    """Request id, run and limits; limits are refused, never silently lowered."""
    memory = request.memory_bytes or min(_MEMORY_BYTES, most_bytes)
    if not _LEAST_MEMORY_BYTES <= memory <= most_bytes:
        raise InvalidRequest(f"memory_bytes must be {_LEAST_MEMORY_BYTES} to {most_bytes}, got {memory}")
    limits = SessionLimits(
        idle_seconds=_seconds("idle_seconds", request.idle_seconds, _IDLE_SECONDS, _MOST_SECONDS),
        ttl_seconds=_seconds("ttl_seconds", request.ttl_seconds, _TTL_SECONDS, _MOST_SECONDS),
        memory_bytes=memory,
    )
    return parse_uuid(request.request_id), parse_run(request.run), limits


def parse_name(name: str) -> str:
    """sessions/{session}; raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"name must be sessions/ and 32 hexadecimal digits, got {name[:60]!r}")
    return name


def parse_exec(request: pb.ExecSessionRequest, most_seconds: float) -> tuple[str, float]:
    """Code and its wall-clock limit."""
    if not request.code or len(request.code) > MAX_CODE_CHARACTERS:
        raise InvalidRequest(f"code must have 1 to {MAX_CODE_CHARACTERS} characters, got {len(request.code)}")
    return request.code, _seconds("timeout_seconds", request.timeout_seconds, _EXEC_SECONDS, most_seconds)


def parse_path(path: str) -> str:
    """A path that stays below the work folder as far as its text says; the child looks at links."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path or len(path) > _MOST_PATH_CHARACTERS:
        raise InvalidRequest(f"path must be relative, without .., up to {_MOST_PATH_CHARACTERS} long: {path[:80]!r}")
    return path


def parse_data(data: bytes) -> bytes:
    """Content for one write."""
    if len(data) > MOST_WRITE_BYTES:
        raise InvalidRequest(f"data has {len(data)} bytes, {MOST_WRITE_BYTES} are allowed; append the rest")
    return data


def parse_range(request: pb.ReadSessionFileRequest) -> tuple[int, int]:
    """Offset and most bytes."""
    most = request.most_bytes or _READ_BYTES
    if most > MOST_READ_BYTES or request.offset_bytes >= 1 << 62:
        raise InvalidRequest(f"most_bytes may be {MOST_READ_BYTES} and offset_bytes below 2^62")
    return request.offset_bytes, most


def to_session(session: Session) -> pb.Session:
    """The session as a message."""
    return pb.Session(
        name=session.name,
        run=session.run,
        age_seconds=session.age_seconds,
        idle_left_seconds=session.idle_left_seconds,
        left_seconds=session.left_seconds,
        execs=session.execs,
    )


def to_exec_response(result: ExecResult) -> pb.ExecSessionResponse:
    """The end of a call as a message."""
    return pb.ExecSessionResponse(
        status=pb.ExecSessionResponse.Status.Value(f"STATUS_{result.status.upper()}"),
        stdout=result.stdout,
        stderr=result.stderr,
        output_truncated=result.output_truncated,
        wall_seconds=result.wall_seconds,
        ended=bool(result.ended_cause),
        ended_cause=result.ended_cause,
    )
