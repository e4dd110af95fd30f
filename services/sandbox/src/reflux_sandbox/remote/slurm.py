"""Jobs as tasks of Slurm arrays, for verifications of minutes to hours such as DFT.

Requests and results are files in the shared folder, `arrays/KEY` says which task of which array has a job: a service
that was restarted goes on waiting for it. Each task is a worker that does one job in a child of its own isolation.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from reflux_kit.errors import StartupError
from reflux_sandbox.execution import SessionLost
from reflux_sandbox.remote.folder import FolderBackend
from reflux_sandbox.remote.settings import SlurmSettings

log = logging.getLogger(__name__)

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
MOST_TASKS = 500
"""Tasks of one array; Slurm's default MaxArraySize is 1001."""
_ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED"}
_COMPLAINT_CHARACTERS = 300
_FORGET_FACTOR = 10


class SlurmAway(ConnectionError):
    """A command of Slurm failed or did not answer."""


class SlurmBackend(FolderBackend):
    """Gathers requests into arrays, looks at the queue for all of them at once."""

    def __init__(self, settings: SlurmSettings, node: dict[str, Any]) -> None:
        super().__init__(settings, node)
        self._settings = settings
        self._environment = {"PATH": os.environ.get("PATH", DEFAULT_PATH)}
        if settings.conf:
            self._environment["SLURM_CONF"] = settings.conf
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._submitter: asyncio.Task[None] | None = None
        self._states: dict[str, str] = {}
        self._submitted: set[str] = set()
        """Tasks since the last look at the queue began: its answer may be older than they are."""
        self._left: dict[str, float] = {}
        """When a job without a result was first missed in the queue."""
        self._looked = -1e9
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        if shutil.which("sbatch", path=self._settings.commands or self._environment["PATH"]) is None:
            raise StartupError("sbatch is not on PATH: install Slurm's commands or set remote.slurm.commands")
        await super().start()
        for name in ("arrays", "logs"):
            (self.mailbox.folder / name).mkdir(mode=0o700, exist_ok=True)

    async def close(self) -> None:
        if self._submitter is not None:
            self._submitter.cancel()
            await asyncio.wait([self._submitter])
        await super().close()

    async def submit(self, key: str) -> None:
        """Joins the next array, unless a task has the job or it is done. Raises SessionLost when sbatch refuses."""
        if self.mailbox.result(key) is not None or await self._state(key):
            return
        submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, submitted))
        if self._submitter is None or self._submitter.done():
            self._submitter = asyncio.create_task(self._submit_gathered())
        await submitted

    async def check(self, key: str) -> None:
        """Raises SessionLost when the task left the queue a while ago without a result. Not at once: a shared file
        system may show its last file later."""
        with contextlib.suppress(SlurmAway):
            if await self._state(key):
                self._left.pop(key, None)
                return
            now = time.monotonic()
            if now - self._left.setdefault(key, now) < self.lost_seconds:
                return
            del self._left[key]
            task = self._task(key)
            self._task_file(key).unlink(missing_ok=True)
            raise SessionLost(f"Slurm job {task or '(none)'} ended without a result; see {self._log_path(task)}")

    async def cancel(self, key: str) -> None:
        await super().cancel(key)
        self._left.pop(key, None)
        if task := self._task(key):
            self._task_file(key).unlink(missing_ok=True)
            try:
                await self._run("scancel", task)
            except SlurmAway as error:  # its worker sees the mark in the folder and stops
                log.warning("Slurm job %s is not cancelled there: %s", task, error)

    async def _submit_gathered(self) -> None:
        await asyncio.sleep(self._settings.gather_seconds)
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_TASKS], self._waiting[MOST_TASKS:]
            try:
                await self._submit_array([key for key, submitted in batch if not submitted.cancelled()])
                failure = None
            except (SlurmAway, OSError, ValueError) as error:
                failure = SessionLost(f"Slurm took no job: {error}")
            for _, submitted in batch:
                if submitted.cancelled():
                    continue
                if failure is None:
                    submitted.set_result(None)
                else:
                    submitted.set_exception(failure)

    async def _submit_array(self, keys: list[str]) -> None:
        if not keys:
            return
        path = self.mailbox.folder / "arrays" / f"array-{uuid.uuid4().hex}"
        path.write_text("\n".join(keys) + "\n")
        answer = await self._run("sbatch", *self._argv(len(keys)), script=self._script(path))
        array = int(answer.strip().partition(";")[0])
        for index, key in enumerate(keys):
            self._task_file(key).write_text(f"{array}_{index}")
            self._states[f"{array}_{index}"] = "PENDING"
            self._submitted.add(f"{array}_{index}")
        log.info("Slurm array %d has %d jobs", array, len(keys))

    def _argv(self, count: int) -> list[str]:
        settings = self._settings
        limit = f"%{settings.most_running}" if settings.most_running else ""
        argv = ["--parsable", "--export=NONE", "--no-requeue", f"--array=0-{count - 1}{limit}"]
        argv += [f"--job-name={settings.job_name}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={settings.cpus}"]
        argv += [f"--mem={settings.memory_mib}M", f"--output={self.mailbox.folder}/logs/%A_%a.log"]
        argv += [f"--chdir={self.mailbox.folder}"]
        if settings.time_limit_minutes:
            argv.append(f"--time={settings.time_limit_minutes}")
        for option in ("partition", "account"):
            if value := getattr(settings, option):
                argv.append(f"--{option}={value}")
        return [*argv, *settings.sbatch_options]

    def _script(self, array: Path) -> str:
        python = self._settings.python or sys.executable
        command = [python, "-m", "reflux_sandbox.remote.worker", "--folder", str(self.mailbox.folder), "--array"]
        return f"#!/bin/sh\nexec {shlex.join([*command, str(array)])}\n"

    async def _state(self, key: str) -> str:
        """State of the task that has a job; empty when there is none, or it has ended. Raises SlurmAway."""
        if not (task := self._task(key)):
            return ""
        async with self._looking:
            if time.monotonic() - self._looked > self._settings.poll_seconds:
                await self._look()
        return self._states.get(task, "")

    async def _look(self) -> None:
        self._submitted.clear()
        text = await self._run(
            "squeue", "--all", "--noheader", "--array", "--states=all", f"--name={self._settings.job_name}",
            "--format=%F_%K|%T",
        )  # fmt: skip
        rows = (line.strip().partition("|")[::2] for line in text.splitlines())
        seen = {task: state for task, state in rows if state in _ALIVE}
        self._states = dict.fromkeys(self._submitted, "PENDING") | seen
        self._looked = now = time.monotonic()
        oldest = now - _FORGET_FACTOR * self.lost_seconds  # those that were answered meanwhile are asked for no more
        self._left = {key: since for key, since in self._left.items() if since > oldest}

    def _task(self, key: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._task_file(key).read_text().strip()
        return ""

    def _task_file(self, key: str) -> Path:
        return self.mailbox.folder / "arrays" / key

    def _log_path(self, task: str) -> str:
        return f"{self.mailbox.folder}/logs/{task}.log"

    async def _run(self, program: str, *argv: str, script: str = "") -> str:
        """One command; it sees PATH and SLURM_CONF, no secret of ours."""
        path = shutil.which(program, path=self._settings.commands or self._environment["PATH"]) or program
        try:
            child = await asyncio.create_subprocess_exec(
                path, *argv, env=self._environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise SlurmAway(f"{program}: {error}") from error
        try:
            async with asyncio.timeout(self._settings.call_seconds):
                out, err = await child.communicate(script.encode())
        except TimeoutError:
            raise SlurmAway(f"{program} did not answer within {self._settings.call_seconds:g} s") from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if child.returncode:
            said = " ".join(err.decode(errors="replace").split())
            raise SlurmAway(f"{program}: {said[:_COMPLAINT_CHARACTERS]}")
        return out.decode(errors="replace")
