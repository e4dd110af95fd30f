"""Translates between the agent's values and its messages."""

import math
import re

from reflux.scheduler.v1 import agent_service_pb2 as agent_pb
from reflux.scheduler.v1 import job_pb2
from reflux_kit.errors import InvalidRequest
from reflux_scheduler.agent.orders import RoleOrder, RoleReport

DEFAULT_GRACE_SECONDS = 10.0
MAX_GRACE_SECONDS = 3600.0
_MAX_CPUS = 1e6
_MAX_SHOWN = 64  # Error texts travel in headers, which are small.
_ROLE_ID = re.compile(r"([a-z0-9-]{1,64})/([a-z0-9][a-z0-9_-]{0,62})/(\d{1,6})")

STATES = {
    "running": job_pb2.RoleStatus.STATE_RUNNING,
    "restarting": job_pb2.RoleStatus.STATE_RESTARTING,
    "succeeded": job_pb2.RoleStatus.STATE_SUCCEEDED,
    "failed": job_pb2.RoleStatus.STATE_FAILED,
    "stopped": job_pb2.RoleStatus.STATE_STOPPED,
}


def parse_order(request: agent_pb.StartRoleRequest) -> RoleOrder:
    """Checks a StartRoleRequest. Raises InvalidRequest."""
    match = _ROLE_ID.fullmatch(request.role_id)
    if match is None:
        raise InvalidRequest(f"role_id = {request.role_id[:_MAX_SHOWN]!r}: write '<job>/<role>/<rank>'")
    spec = request.spec
    if (match[2], int(match[3])) != (spec.role, request.rank) or f"jobs/{match[1]}" != request.job:
        raise InvalidRequest(f"role_id = {request.role_id[:_MAX_SHOWN]!r} contradicts job, spec.role and rank")
    if not spec.argv or not spec.argv[0] or any("\0" in word for word in spec.argv):
        raise InvalidRequest("spec.argv: name a program; no argument holds a zero byte")
    return RoleOrder(
        role_id=request.role_id,
        job=request.job,
        role=spec.role,
        rank=request.rank,
        count=spec.count,
        argv=tuple(spec.argv),
        environment=tuple((entry.name, entry.value) for entry in spec.environment),
        gpu_indices=tuple(request.gpu_indices),
        node_gpu_indices=tuple(request.node_gpu_indices),
        rails=tuple(request.rails),
        memory_bytes=spec.resources.memory_bytes,
        millicpus=_millicpus(spec.resources.cpus),
        attempt=request.attempt,
        max_restarts=spec.max_restarts,
        stop_grace_seconds=parse_grace(spec.stop_grace_seconds),
    )


def _millicpus(cpus: float) -> int:
    if not math.isfinite(cpus) or not 0 <= cpus <= _MAX_CPUS:
        raise InvalidRequest(f"spec.resources.cpus = {cpus!r}: 0 to {_MAX_CPUS:g}")
    return round(cpus * 1000)


def parse_grace(seconds: float) -> float:
    """A grace in seconds, 0 means the default. Raises InvalidRequest."""
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_GRACE_SECONDS:
        raise InvalidRequest(f"grace_seconds = {seconds!r}: 0 (default) to {MAX_GRACE_SECONDS:g}")
    return seconds or DEFAULT_GRACE_SECONDS


def render_report(report: RoleReport, node: str) -> job_pb2.RoleStatus:
    """The message of a report."""
    return job_pb2.RoleStatus(
        role_id=report.role_id,
        job=report.job,
        pid=report.pid,
        restarts=report.restarts,
        exit_code=report.exit_code,
        state=STATES[report.state],
        rss_bytes=report.rss_bytes,
        node=node,
        log_path=report.log_path,
        message=report.message,
        revision=report.revision,
        started_at=report.started_at,
        attempt=report.attempt,
    )
