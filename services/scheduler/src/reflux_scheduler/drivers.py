"""Owns which jobs have a driver: every placed one does, and hears when something of interest to it has happened."""

from collections.abc import Callable, Iterable

from reflux_scheduler.book import Book
from reflux_scheduler.driver import JobDriver, Tools
from reflux_scheduler.job import Job
from reflux_scheduler.ledger import Ledger


class Drivers:
    """Drivers by job. `done` is called whenever one has ended."""

    def __init__(self, tools: Tools, done: Callable[[], None]) -> None:
        self._tools = tools
        self._book: Book = tools.book
        self._ledger: Ledger = tools.ledger
        self._done = done
        self._drivers: dict[str, JobDriver] = {}
        self._undriven: set[str] = set()
        """Jobs that may need a driver: those that changed, or whose driver has ended."""

    def add(self, job_ids: Iterable[str]) -> None:
        """Jobs that may need a driver."""
        self._undriven.update(job_ids)

    def changed(self, before: Job, after: Job) -> None:
        """A job changed: its driver looks at it, or it may need one; those who waited for it to leave are told."""
        driver = self._drivers.get(after.id)
        if driver is None:
            self._undriven.add(after.id)
        elif after.sequence != before.sequence:
            driver.nudge()
        if self._ledger.take_left():
            for each in self._drivers.values():
                if each.is_blocked:
                    each.nudge()

    def nudge(self, job_ids: Iterable[str] | None = None) -> None:
        """Something that these jobs (None: all) may wait for has happened."""
        for job_id in list(self._drivers) if job_ids is None else job_ids:
            driver = self._drivers.get(job_id)
            if driver is not None:
                driver.nudge()

    def drive(self) -> None:
        """Gives every placed job its driver."""
        undriven, self._undriven = self._undriven, set()
        for job_id in undriven - self._drivers.keys():
            job = self._book.jobs.get(job_id)
            if job is not None and job.placement is not None and not job.final:
                self._drivers[job_id] = JobDriver(job_id, self._tools, self._ended)

    async def close(self) -> None:
        """Ends all drivers; members keep running."""
        for driver in list(self._drivers.values()):
            await driver.close()

    def _ended(self, job_id: str) -> None:
        self._drivers.pop(job_id, None)
        self._undriven.add(job_id)
        self._done()
