"""The contract between the scheduler and what runs a job's members."""

from abc import ABC, abstractmethod

from reflux_scheduler.gang import Member
from reflux_scheduler.job import Job, Report


class BackendAway(ConnectionError):
    """The backend does not answer; the same call may succeed soon, and may already have been carried out."""


class StartRefused(RuntimeError):
    """The backend will never start this member; the message says why."""


class Backend(ABC):
    """Starts and stops members of placed jobs; decides nothing.

    Both calls are idempotent by (job, role, rank), because the scheduler repeats them after a crash or a lost answer: a
    member that runs is left alone, a member that is gone stays gone. What members do afterwards arrives as reports.
    """

    @abstractmethod
    async def start(self, job: Job, member: Member) -> tuple[str, Report]:
        """Starts one member; the agent's incarnation and the member's report. Raises BackendAway or StartRefused."""

    @abstractmethod
    async def stop(self, job: Job, member: Member) -> tuple[str, Report] | None:
        """Stops one member, after its role's grace by force; None when there is none. Raises BackendAway."""
