"""Jobs for workers that share a folder: another host on the same file system, or a machine beside an instrument.

A worker there runs `reflux-sandbox-worker --folder FOLDER`. Nothing but the folder connects the two.
"""

import asyncio
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from reflux_kit.errors import StartupError
from reflux_sandbox.execution import SessionLost
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote.base import Backend, GradingSession
from reflux_sandbox.remote.mailbox import Mailbox, work_key
from reflux_sandbox.remote.settings import FolderSettings

log = logging.getLogger(__name__)

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.02, 1.0
_SWEEP_SECONDS = 600.0


class FolderBackend(Backend):
    """Hands jobs out through a Mailbox and waits for results. A job outlives this service."""

    def __init__(self, settings: FolderSettings, node: dict[str, Any]) -> None:
        """`node` is what workers are told about children (`settings.node_values`)."""
        self._keep_seconds = settings.keep_hours * 3600
        self.lost_seconds = settings.lost_seconds
        self._node = node
        self._folder = Path(settings.folder)
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def mailbox(self) -> Mailbox:
        assert self._sweeper is not None, "started first"
        return self._mailbox

    async def start(self) -> None:
        try:
            self._mailbox = Mailbox(self._folder)
            self._mailbox.write_node(self._node)
        except OSError as error:
            raise StartupError(f"the folder {self._folder} for remote jobs cannot be used: {error}") from None
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    def session(self, info: VerifierInfo) -> GradingSession:
        return MailboxSession(self, info)

    async def submit(self, key: str) -> None:
        """Makes somebody look for the request. Workers of a folder look by themselves."""

    async def check(self, key: str) -> None:
        """Raises SessionLost when nobody will answer any more, as far as others than the worker know."""

    async def cancel(self, key: str) -> None:
        """Ends the work."""
        await asyncio.to_thread(self.mailbox.cancel, key)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._mailbox.sweep, self._keep_seconds)
            except OSError as error:
                log.warning("old files of %s are not removed: %s", self._folder, error)
            await asyncio.sleep(_SWEEP_SECONDS)


class MailboxSession:
    """One job at a time through the mailbox of `place`."""

    progress = 0.0

    def __init__(self, place: FolderBackend, info: VerifierInfo) -> None:
        self._place = place
        self._info = info
        self._key = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._key and kind is not None and not issubclass(kind, asyncio.CancelledError):
            await self._place.cancel(self._key)

    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """As in GradingSession; a result that is there already, or a job that still runs, is taken up."""
        mailbox, key = self._place.mailbox, work_key(verifier, self._info.version, payload, answers)
        request = {"verifier": verifier, "version": self._info.version, "payload": payload, "answers": answers}
        try:
            await asyncio.to_thread(mailbox.put, key, request, self._place.lost_seconds)
            self._key = key
            await self._place.submit(key)
            answer = await self._until_answered(key)
        except (OSError, ValueError) as error:
            raise SessionLost(f"the folder {mailbox.folder} failed: {error}") from error
        if "grades" not in answer:
            await asyncio.to_thread(mailbox.forget, key)
        self._key = ""
        return answer

    async def _until_answered(self, key: str) -> dict[str, Any]:
        mailbox, loop = self._place.mailbox, asyncio.get_running_loop()
        pause, last_sign, last_change = _FIRST_POLL_SECONDS, None, loop.time()
        while (answer := await asyncio.to_thread(mailbox.result, key)) is None:
            sign = await asyncio.to_thread(mailbox.sign_of_life, key)
            if sign is None or sign != last_sign:
                last_sign, last_change = sign, loop.time()
            elif loop.time() - last_change > self._place.lost_seconds:
                await asyncio.to_thread(mailbox.cancel, key)  # the next one who asks does not wait for this worker
                raise SessionLost(f"the worker has given no sign of life for {self._place.lost_seconds:g} s")
            await self._place.check(key)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LAST_POLL_SECONDS)
        return answer
