"""Slurm through its commands: sbatch, squeue, scancel, scontrol."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping

from reflux_placement.sources.hostlist import compress
from reflux_placement.sources.slurm_nodes import NodeRecord, names_of, parse_nodes_text
from reflux_scheduler.backends.base import BackendAway
from reflux_scheduler.backends.slurm.client import (
    Component,
    JobOrder,
    JobRecord,
    SlurmClient,
    Version,
    complaint,
    is_gone,
    own_user,
    parse_version,
    shorten,
)
from reflux_scheduler.backends.slurm.job import comment
from reflux_scheduler.backends.slurm.settings import SlurmSettings

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_QUEUE_FORMAT = "%A|%j|%T|%r|%N|%n|%k"
_QUEUE_FIELDS = 7


class _Failed(BackendAway):
    """A command said no. For all calls but a submission that means: not now."""


class CommandClient(SlurmClient):
    """One short process per call. Commands see nothing of this process's environment but PATH and a job's own."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._user = settings.user or own_user()
        self._environment = {"PATH": os.environ.get("PATH", DEFAULT_PATH)}
        if settings.conf:
            self._environment["SLURM_CONF"] = settings.conf

    async def version(self) -> Version:
        return parse_version(await self._run("sbatch", "--version"))

    async def submit(self, order: JobOrder) -> int:
        argv = sbatch_argv(order, self._settings)
        try:
            answer = await self._run("sbatch", *argv, script=order.script, environment=order.environment)
        except _Failed as error:
            raise complaint("sbatch", str(error)) from None
        return int(answer.strip().partition(";")[0])

    async def cancel(self, job_ids: Iterable[int]) -> None:
        ids = [str(job_id) for job_id in job_ids]
        if not ids:
            return
        try:
            await self._run("scancel", *ids)
        except _Failed as error:
            if not is_gone(str(error)):
                raise

    async def jobs(self, prefix: str) -> list[JobRecord]:
        text = await self._run(
            "squeue",
            "--all",
            "--local",
            "--noheader",
            "--states=all",
            f"--user={self._user}",
            f"--format={_QUEUE_FORMAT}",
        )
        return [record for line in text.splitlines() if (record := _record(line, prefix)) is not None]

    async def nodes(self) -> list[NodeRecord]:
        return parse_nodes_text(await self._run("scontrol", "--all", "--details", "--oneliner", "show", "nodes"))

    async def topology(self) -> str:
        return await self._run("scontrol", "show", "topology")

    async def cluster(self) -> str:
        for line in (await self._run("scontrol", "show", "config")).splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "ClusterName":
                return value.strip()
        return "slurm"

    async def _run(
        self, program: str, *argv: str, script: str = "", environment: Mapping[str, str] | None = None
    ) -> str:
        path = shutil.which(program, path=self._settings.commands or self._environment["PATH"])
        if path is None:
            where = self._settings.commands or "PATH"
            raise BackendAway(f"{program} is not in {where}: install Slurm's commands or set rest_url")
        child = await asyncio.create_subprocess_exec(
            path, *argv, env={**self._environment, **(environment or {})},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._settings.call_seconds):
                out, err = await child.communicate(script.encode())
        except TimeoutError:
            raise BackendAway(f"{program} did not answer within {self._settings.call_seconds:g} s") from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if child.returncode:
            raise _Failed(f"{program}: {shorten(err.decode(errors='replace'))}")
        return out.decode(errors="replace")


def sbatch_argv(order: JobOrder, settings: SlurmSettings) -> list[str]:
    """Options of sbatch, components separated by ":". No secret is among them: those are the environment's."""
    argv = ["--parsable", "--export=ALL", "--no-kill", "--no-requeue", "--dependency=singleton"]
    argv += [f"--output={order.output}", f"--chdir={settings.work_dir}"]
    for index, (name, component) in enumerate(order.named()):
        argv += [":"] * (index > 0) + _component_argv(name, component, order, settings)
    return argv


def _component_argv(name: str, component: Component, order: JobOrder, settings: SlurmSettings) -> list[str]:
    count = len(component.nodes)
    argv = [f"--job-name={name}", f"--comment={comment(component)}"]
    argv += [f"--nodes={count}", "--ntasks-per-node=1", f"--cpus-per-task={component.cpus}"]
    argv.append(f"--mem={component.memory_mib}M")
    if component.gpus:
        argv.append(f"--gres=gpu:{component.gpus}")
    if order.pin == "nodelist":
        argv.append(f"--nodelist={compress(component.nodes)}")
    elif order.others:
        argv.append(f"--exclude={compress(order.others)}")
    if order.switches:
        argv.append(f"--switches={order.switches}")
    if order.segment_size and count % order.segment_size == 0:
        argv.append(f"--segment={order.segment_size}")
    for option in ("partition", "account", "qos", "reservation", "constraint"):
        if value := getattr(settings, option):
            argv.append(f"--{option}={value}")
    if settings.time_limit_minutes:
        argv.append(f"--time={settings.time_limit_minutes}")
    return [*argv, *settings.sbatch_options]


def _record(line: str, prefix: str) -> JobRecord | None:
    fields = line.split("|", _QUEUE_FIELDS - 1)
    # Names of other jobs of this user may hold anything; ours hold no bar.
    if len(fields) != _QUEUE_FIELDS or not fields[1].startswith(prefix):
        return None
    number, name, state, reason, nodes, asked, text = fields
    said = "" if reason == "None" else reason
    return JobRecord(int(number), name, state, said, names_of(nodes), names_of(asked), text)
