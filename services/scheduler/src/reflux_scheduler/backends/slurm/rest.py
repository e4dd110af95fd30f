"""Slurm through slurmrestd (v0.0.38 and newer) with a JWT."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from reflux_placement.sources.hostlist import compress
from reflux_placement.sources.slurm_nodes import NodeRecord, names_of, parse_nodes_json
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
from reflux_scheduler.backends.slurm.commands import DEFAULT_PATH
from reflux_scheduler.backends.slurm.job import comment
from reflux_scheduler.backends.slurm.settings import SlurmSettings

_MODERN = 39
"""v0.0.39 took the names of the C structure over (required_nodes, tres_per_node); v0.0.38 has those of the options."""


class _Failed(BackendAway):
    """Slurm said no, perhaps to the token. For all calls but a submission that means: not now."""


class RestClient(SlurmClient):
    """One HTTP session, opened with the first call."""

    def __init__(self, settings: SlurmSettings) -> None:
        if settings.sbatch_options:
            raise ValueError("slurm.sbatch_options: options of sbatch have no effect with slurm.rest_url")
        self._settings = settings
        self._user = settings.user or own_user()
        self._number = int(settings.rest_version.rpartition(".")[2])
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def version(self) -> Version:
        meta = (await self._call("GET", "ping")).get("meta", {})
        slurm = meta.get("Slurm") or meta.get("slurm") or {}
        return parse_version(str(slurm.get("release", "")))

    async def submit(self, order: JobOrder) -> int:
        try:
            answer = await self._call("POST", "job/submit", submission(order, self._settings, self._number))
        except _Failed as error:
            raise complaint("slurmrestd", str(error)) from None
        return int(answer["job_id"])

    async def cancel(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            try:
                await self._call("DELETE", f"job/{job_id}")
            except _Failed as error:
                if not is_gone(str(error)):
                    raise

    async def jobs(self, prefix: str) -> list[JobRecord]:
        jobs = (await self._call("GET", "jobs")).get("jobs", [])
        ours = [job for job in jobs if job.get("user_name") == self._user and str(job["name"]).startswith(prefix)]
        return [_record(job) for job in ours]

    async def nodes(self) -> list[NodeRecord]:
        return parse_nodes_json(await self._call("GET", "nodes"))

    async def topology(self) -> str:
        return ""  # No version serves it; `topology_file` does.

    async def cluster(self) -> str:
        meta = (await self._call("GET", "ping")).get("meta", {})
        slurm = meta.get("slurm") or meta.get("Slurm") or {}
        return str(slurm.get("cluster") or "slurm")

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        settings = self._settings
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=settings.call_seconds))
        url = f"{settings.rest_url.rstrip('/')}/slurm/{settings.rest_version}/{path}"
        try:
            async with self._session.request(method, url, json=body, headers=self._headers()) as response:
                if response.status in (401, 403):
                    raise BackendAway(f"slurmrestd refuses the token of user {self._user}")
                answer = await response.json(content_type=None)
        except TimeoutError:
            raise BackendAway(f"slurmrestd did not answer within {settings.call_seconds:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise BackendAway(f"slurmrestd at {settings.rest_url}: {error}") from None
        if errors := answer.get("errors"):
            said = "; ".join(_say(error) for error in errors)
            raise _Failed(f"slurmrestd {method} {path} as {self._user}: {shorten(said)}")
        return answer

    def _headers(self) -> dict[str, str]:
        settings = self._settings
        token = settings.rest_token
        if settings.rest_token_file:
            try:
                token = Path(settings.rest_token_file).read_text().strip()
            except OSError as error:
                raise BackendAway(f"the token file {settings.rest_token_file} cannot be read: {error}") from None
        return {"X-SLURM-USER-NAME": self._user, "X-SLURM-USER-TOKEN": token.removeprefix("SLURM_JWT=")}


def submission(order: JobOrder, settings: SlurmSettings, number: int) -> dict[str, Any]:
    """The body of a submission for OpenAPI version v0.0.`number`."""
    build = _modern if number >= _MODERN else _v38
    jobs = [build(name, component, order, settings) for name, component in order.named()]
    if number > _MODERN + 1:
        jobs[0]["script"] = order.script  # v0.0.41 moved the script into the job.
        return {"job": jobs[0]} if len(jobs) == 1 else {"jobs": jobs}
    return {"script": order.script, "job": jobs[0]} if len(jobs) == 1 else {"script": order.script, "jobs": jobs}


def _common(name: str, component: Component, order: JobOrder, settings: SlurmSettings) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": name,
        "comment": comment(component),
        "dependency": "singleton",
        "requeue": False,
        "tasks": len(component.nodes),
        "tasks_per_node": 1,
        "cpus_per_task": component.cpus,
        "current_working_directory": settings.work_dir,
        "standard_output": order.output,
        "standard_error": order.output,
    }
    named = {"constraints": settings.constraint, "partition": settings.partition, "account": settings.account}
    named |= {"qos": settings.qos, "reservation": settings.reservation}
    return body | {key: value for key, value in named.items() if value}


def _v38(name: str, component: Component, order: JobOrder, settings: SlurmSettings) -> dict[str, Any]:
    """`nodelist` and `exclude_nodes` are not in the published schema of v0.0.38, but its parser takes them (22.05.8);
    `required_switches` it refuses: the nodes are pinned all the same."""
    count = len(component.nodes)
    body = _common(name, component, order, settings)
    body |= {"nodes": [count, count], "memory_per_node": component.memory_mib, "no_kill": "set"}
    body["environment"] = {"PATH": DEFAULT_PATH, **order.environment}
    if component.gpus:
        body["gres"] = f"gpu:{component.gpus}"
    if order.pin == "nodelist":
        body["nodelist"] = compress(component.nodes)
    elif order.others:
        body["exclude_nodes"] = compress(order.others)
    if settings.time_limit_minutes:
        body["time_limit"] = settings.time_limit_minutes
    return body


def _modern(name: str, component: Component, order: JobOrder, settings: SlurmSettings) -> dict[str, Any]:
    count = len(component.nodes)
    environment = {"PATH": DEFAULT_PATH, **order.environment}
    body = _common(name, component, order, settings)
    body |= {"minimum_nodes": count, "maximum_nodes": count, "kill_on_node_fail": False}
    body |= {"memory_per_node": _set(component.memory_mib), "environment": [f"{k}={v}" for k, v in environment.items()]}
    if component.gpus:
        body["tres_per_node"] = f"gres/gpu:{component.gpus}"
    if order.pin == "nodelist":
        body["required_nodes"] = list(component.nodes)
    elif order.others:
        body["excluded_nodes"] = list(order.others)
    if order.switches:
        body["required_switches"] = _set(order.switches)
    if order.segment_size and count % order.segment_size == 0:
        body["segment_size"] = order.segment_size
    if settings.time_limit_minutes:
        body["time_limit"] = _set(settings.time_limit_minutes)
    return body


def _set(number: int) -> dict[str, Any]:
    return {"set": True, "number": number}


def _record(job: Mapping[str, Any]) -> JobRecord:
    state = job["job_state"] if isinstance(job["job_state"], str) else _main_state(job["job_state"])
    reason = str(job.get("state_reason") or "")
    said = "" if reason == "None" else reason
    asked = names_of(job.get("required_nodes"))
    return JobRecord(
        int(job["job_id"]), str(job["name"]), state, said, names_of(job.get("nodes")), asked, str(job.get("comment"))
    )


def _main_state(words: list[str]) -> str:
    """Newer versions give the base state and flags; COMPLETING and CONFIGURING say more than the base state."""
    flags = [word for word in words if word in ("COMPLETING", "CONFIGURING", "REQUEUED", "STOPPED")]
    return (flags or words or ["UNKNOWN"])[0]


def _say(error: Mapping[str, Any]) -> str:
    return " ".join(str(error[key]) for key in ("description", "error") if error.get(key))
