"""Entry point of the agent: one per node."""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from reflux.scheduler.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from reflux_kit.errors import StartupError
from reflux_kit.server import Bound, Mount, Service, serve
from reflux_kit.settings import ServiceSettings, prefix
from reflux_scheduler.agent.cgroup import MemberGroups
from reflux_scheduler.agent.lease import Lease, TermGuard
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.schedulers import Schedulers
from reflux_scheduler.agent.servicer import SERVICE_NAME, AgentServicer
from reflux_scheduler.agent.supervisor import Household

log = logging.getLogger(__name__)


class AgentSettings(ServiceSettings):
    """Settings of the agent, REFLUX_AGENT_*."""

    model_config = prefix("agent")

    node: str = "local"
    """Node of the topology that this agent serves: its name or full path."""

    grant: str = ""
    """Grant that this agent was started for; empty for the node's own agent, which serves every job."""

    advertise: str = ""
    """host:port under which the scheduler reaches this agent; empty takes the bound address."""

    lease_seconds: float = Field(default=60.0, gt=0)
    """Members are stopped after this long without a scheduler, until a scheduler says otherwise."""

    log_limit_mib: int = Field(default=32, ge=1)
    """Size at which a member's log is rolled over; two files are kept."""

    keep_job_logs: int = Field(default=20, ge=0)
    """Log folders of ended jobs that are kept, the newest."""


@asynccontextmanager
async def build(settings: AgentSettings, environment: Mapping[str, str]) -> AsyncIterator[Service]:
    """Owns the members: all of them are stopped when the block ends. Roles inherit `environment`."""
    state_dir = Path(settings.state_dir or tempfile.gettempdir() + f"/reflux-{os.getuid()}").absolute()
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the state folder {state_dir} cannot be used: {error.strerror}") from None
    limit_bytes = settings.log_limit_mib << 20
    groups, terms = MemberGroups.open(), TermGuard()
    log.info("members have %s", groups.reason)
    household = Household(
        settings.node, environment, state_dir, limit_bytes, settings.keep_job_logs, groups, bool(settings.grant)
    )
    members = MemberTable(household)
    async with Schedulers(settings.scheduler_address, settings) as schedulers:
        lease = Lease(schedulers, members, settings.node, settings.lease_seconds, settings.grant, terms)
        mount = Mount(AgentServicer(members, settings.node, terms), add_AgentServiceServicer_to_server, SERVICE_NAME)

        @asynccontextmanager
        async def attend(bound: Bound) -> AsyncIterator[None]:
            address = settings.advertise or bound.grpc
            await lease.begin(address)
            task = asyncio.create_task(lease.keep(address))
            task.add_done_callback(_leave_if_failed)
            try:
                yield
            finally:
                # Heartbeats go on while members stop, so that the scheduler sees their ends.
                await members.close()
                told_to_stop = not task.done()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                if told_to_stop:
                    await lease.leave()
                groups.close()

        yield Service((mount,), attend=attend)


def _leave_if_failed(task: "asyncio.Task[None]") -> None:
    """Without its lease the agent is of no use: leave in order, so that the members stop and a new agent can start."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("the lease loop failed", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Runs the agent until SIGTERM or SIGINT."""
    environment = dict(os.environ)
    serve("agent", AgentSettings, lambda settings: build(settings, environment))


if __name__ == "__main__":
    main()
