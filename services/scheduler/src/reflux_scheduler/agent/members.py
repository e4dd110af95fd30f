"""Owns the members of one agent: starts each once, measures them, stops and forgets them."""

import asyncio
import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Iterable, Set
from dataclasses import replace
from pathlib import Path

from reflux_scheduler.agent.keeper import descendants, parents
from reflux_scheduler.agent.orders import RoleOrder, RoleReport
from reflux_scheduler.agent.supervisor import Household, RoleSupervisor

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemberTable:
    """Members by role id. Ended members stay listed until they are forgotten, so that no end goes unnoticed."""

    def __init__(self, household: Household) -> None:
        self._household = household
        self._members: dict[str, RoleSupervisor] = {}
        self._closed = False
        self._revisions = itertools.count(1)
        self.changed = asyncio.Event()
        """Set at every change of a report; the lease clears it."""

    async def start(self, order: RoleOrder) -> RoleReport:
        """Starts a member; one that runs, or ended by itself, is left alone. One that was stopped starts anew, and so
        does one of an earlier attempt of its job, which is stopped first.

        Raises RuntimeError once the table is closed.
        """
        if self._closed:
            raise RuntimeError("the agent is shutting down")
        member = self._members.get(order.role_id)
        if member is not None and member.order.attempt < order.attempt:
            member.request_stop("a later attempt of its job starts")
            await member.stopped()
            member = self._members.get(order.role_id)
            member = member if member is not None and member.order.attempt >= order.attempt else None
        if member is not None and member.report.state == "stopped":
            member = None
        if member is None:
            new_job = not self._household.log_folder(order.job).exists()
            member = RoleSupervisor(order, self._household, self.changed.set, self._revisions)
            self._members[order.role_id] = member
            if new_job:
                await self._prune_logs()
        return await member.settled()

    async def _prune_logs(self) -> None:
        """Makes room for a new job: of ended jobs only the newest log folders stay."""
        household = self._household
        used = {household.log_folder(member.order.job) for member in self._members.values() if not member.ended}
        await asyncio.to_thread(prune, household.logs, household.keep_job_logs, used)

    async def stop(self, role_id: str, grace_seconds: float | None, reason: str, *, wait: bool = True) -> RoleReport:
        """Stops a member and waits for its end, if so asked. Raises LookupError when there is none of that id."""
        member = self._members[role_id]
        member.request_stop(reason, grace_seconds)
        return await member.stopped() if wait else member.report

    def named(self, role_ids: Iterable[str]) -> list[RoleSupervisor]:
        """The members of these ids as they are now; a later one of the same id is another."""
        return [self._members[role_id] for role_id in role_ids if role_id in self._members]

    async def discard(self, unwanted: Iterable[RoleSupervisor]) -> None:
        """Stops members that the scheduler does not want, and forgets them."""
        unwanted = list(unwanted)
        for member in unwanted:
            member.request_stop("the scheduler does not want this member")
        for member in unwanted:
            await member.stopped()
            if self._members.get(member.order.role_id) is member:
                del self._members[member.order.role_id]

    async def stop_all(self, reason: str, longest_seconds: float = math.inf) -> None:
        """Stops every member, all at the same time; none of them has a longer grace than `longest_seconds`."""
        members = list(self._members.values())
        for member in members:
            member.request_stop(reason, min(member.order.stop_grace_seconds, longest_seconds))
        for member in members:
            await member.stopped()

    async def close(self) -> None:
        """Stops every member and starts none any more."""
        self._closed = True
        await self.stop_all("the agent is shutting down")

    def reports(self) -> list[RoleReport]:
        """What every member does, without memory figures; one whose first start is under way is no member yet."""
        return [member.report for member in self._members.values() if member.report.revision]

    async def measured(self) -> list[RoleReport]:
        """Like `reports`, with the resident memory of each process tree."""
        used = await asyncio.to_thread(tree_rss_bytes, [report.pid for report in self.reports() if report.pid])
        return [replace(report, rss_bytes=used.get(report.pid, 0)) for report in self.reports()]


def prune(folder: Path, keep: int, used: Set[Path]) -> None:
    """Removes all but the `keep` newest subfolders; those in `used` stay and do not count."""
    ended = [path for path in folder.glob("*/") if path not in used]
    for path in sorted(ended, key=_last_write, reverse=True)[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def _last_write(folder: Path) -> float:
    times = [0.0]
    with contextlib.suppress(OSError):  # somebody may remove it meanwhile
        times += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return max(times)


def tree_rss_bytes(roots: Iterable[int]) -> dict[int, int]:
    """Resident bytes of each process and everything below it; pages that processes share are counted in each."""
    table = parents()
    return {root: sum(_rss_bytes(pid) for pid in (root, *descendants(root, table))) for root in roots}


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0  # It ended in between.
