"""Owns one member: start, watch, restart within bounds, stop."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from reflux_scheduler import restarts
from reflux_scheduler.agent.cgroup import MemberGroups
from reflux_scheduler.agent.orders import RoleOrder, RoleReport
from reflux_scheduler.agent.process import RoleProcess

log = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Household:
    """What all members of one agent share."""

    node: str
    environment: Mapping[str, str]
    """The agent's own environment, on which a role's environment is laid."""

    state_dir: Path
    """Parent of `logs/`; roles start in it."""

    log_limit_bytes: int
    keep_job_logs: int = 20
    """Log folders of ended jobs that are kept, the newest."""

    groups: MemberGroups = field(default_factory=MemberGroups)
    """Control groups of the members; without folders nothing is limited."""

    inside_grant: bool = False
    """The agent runs inside an allocation whose environment names the devices that it has."""

    @property
    def logs(self) -> Path:
        """Parent of the log folders of jobs."""
        return self.state_dir / "logs"

    def log_folder(self, job: str) -> Path:
        """Log folder of one job."""
        return self.logs / job.rpartition("/")[2]


class RoleSupervisor:
    """Keeps one member running until it succeeds, fails for good or is stopped."""

    def __init__(
        self, order: RoleOrder, household: Household, changed: Callable[[], None], revisions: "itertools.count[int]"
    ) -> None:
        self.order = order
        self._household = household
        self._changed = changed
        self._revisions = revisions
        self._log_path = household.log_folder(order.job) / f"{order.role}-{order.rank}.log"
        self.report = RoleReport(
            order.role_id, order.job, "restarting", log_path=str(self._log_path), attempt=order.attempt
        )
        self._process: RoleProcess | None = None
        self._grace: float | None = None
        self._stopping = asyncio.Event()
        self._reason = ""
        self._out_of_memory = False
        self._first = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=order.role_id)

    @property
    def ended(self) -> bool:
        """Whether the member is done for good."""
        return self._task.done()

    async def settled(self) -> RoleReport:
        """The report after the first attempt to start."""
        await self._first.wait()
        return self.report

    def request_stop(self, reason: str, grace_seconds: float | None = None) -> None:
        """Begins the stop; a member that ended for good stays as it is. A later request may end the grace earlier,
        never prolong it."""
        grace = self.order.stop_grace_seconds if grace_seconds is None else grace_seconds
        if not self._stopping.is_set():
            self._reason = reason
            self._stopping.set()
        self._grace = grace if self._grace is None else min(self._grace, grace)
        if self._process is not None:
            self._process.stop(grace)

    async def stopped(self) -> RoleReport:
        """Waits until the member is done for good."""
        await asyncio.wait([self._task])
        return self.report

    async def _run(self) -> None:
        try:
            await self._live()
        except Exception as error:  # task boundary: a member that nobody watches must not be reported as running
            log.exception("the supervisor of %s failed", self.order.role_id)
            if self._process is not None:
                self._process.kill()
            self._tell(state="failed", pid=0, message=f"its supervisor failed: {type(error).__name__}")
        finally:
            self._household.groups.leave(self.order.role_id)

    async def _live(self) -> None:
        times: tuple[float, ...] = ()
        while not self._stopping.is_set():
            try:
                code = await self._once(len(times))
            except OSError as error:  # CannotStart, or no process or file descriptor to be had
                self._tell(state="failed", pid=0, message=f"cannot be started: {error}")
                return
            if self._stopping.is_set():
                self._tell(state="stopped", pid=0, exit_code=code, message=self._reason)
                return
            verdict = restarts.judge(code, times, time.monotonic(), self.order.max_restarts)
            log.info("%s (pid %d) %s: %s", self.order.role_id, self.report.pid, restarts.ended(code), verdict.action)
            if verdict.action != "restart":
                message = self._with_tail(verdict.cause) if verdict.cause else ""
                self._tell(state=verdict.action, pid=0, exit_code=code, message=message)
                return
            times = (*times, time.monotonic())
            cause = self._with_tail(verdict.cause)
            self._tell(state="restarting", pid=0, exit_code=code, restarts=len(times), message=cause)
            await self._pause(verdict.pause_seconds)
        self._tell(state="stopped", pid=0, message=self._reason)

    async def _once(self, restarts_so_far: int) -> int:
        """One life of the process; its exit code."""
        environment, household = self._environment(restarts_so_far), self._household
        joined = household.groups.enter(self.order.role_id, self.order.memory_bytes, self.order.millicpus)
        kills = household.groups.memory_kills(self.order.role_id)
        self._process = await RoleProcess.start(
            self.order.argv, environment, household.state_dir, self._log_path, household.log_limit_bytes, joined
        )
        if self._stopping.is_set():
            self._process.stop(self._grace or 0.0)
        log.info("%s started with pid %d", self.order.role_id, self._process.pid)
        self._tell(state="running", pid=self._process.pid, started_at=time.time())
        code = await self._process.wait()
        self._process = None
        self._out_of_memory = household.groups.memory_kills(self.order.role_id) > kills
        return code

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _environment(self, restarts_so_far: int) -> dict[str, str]:
        order = self.order
        visible = self._household.environment.get("CUDA_VISIBLE_DEVICES", "")
        return {
            **self._household.environment,
            "PYTHONUNBUFFERED": "1",
            # A role that asked for no accelerator must not take one by accident.
            "CUDA_VISIBLE_DEVICES": ",".join(devices_of(order, visible, self._household.inside_grant)),
            "REFLUX_RAILS": ",".join(order.rails),
            **dict(order.environment),
            "REFLUX_JOB": order.job,
            "REFLUX_ROLE": order.role,
            "REFLUX_RANK": str(order.rank),
            "REFLUX_ROLE_COUNT": str(order.count),
            "REFLUX_RESTARTS": str(restarts_so_far),
            "REFLUX_NODE": self._household.node,
        }

    def _with_tail(self, cause: str) -> str:
        """The cause with the last line that the member wrote, which mostly says why."""
        if self._out_of_memory:
            gib = self.order.memory_bytes / (1 << 30)
            cause = f"{cause}, by the kernel: it used more than its {gib:.3g} GiB of memory"
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return cause
        last = "".join(c for c in lines[-1] if c.isprintable())[:_MAX_MESSAGE] if lines else ""
        return f"{cause}; last output: {last}" if last else cause

    def _tell(self, **changes: object) -> None:
        self.report = replace(self.report, revision=next(self._revisions), **changes)  # type: ignore[arg-type]
        self._first.set()
        self._changed()


def devices_of(order: RoleOrder, visible: str, inside_grant: bool) -> list[str]:
    """A member's GPUs as CUDA calls them.

    Inside an allocation the k-th GPU that the job holds on this node is the k-th device that the allocation shows
    (`visible`, the agent's own CUDA_VISIBLE_DEVICES); elsewhere indices are the node's own.
    """
    shown = [name for name in visible.split(",") if name]
    held = order.node_gpu_indices
    if not inside_grant or not shown or not held:
        return [str(index) for index in order.gpu_indices]
    positions = [held.index(gpu) for gpu in order.gpu_indices if gpu in held]
    return [shown[position] for position in positions if position < len(shown)]
