"""Backend `slurm`: grants are Slurm jobs, found again by their names."""

import asyncio
import importlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from reflux_placement.sources.slurm import Labels, parse_topology_text, parse_topology_yaml, slurm_topology
from reflux_placement.topology import Topology
from reflux_scheduler.backends.base import AgentLaunch, Backend, Grant, GrantStatus, NodeCondition
from reflux_scheduler.backends.slurm import states
from reflux_scheduler.backends.slurm.client import JobOrder, JobRecord, SlurmClient, Version
from reflux_scheduler.backends.slurm.commands import CommandClient
from reflux_scheduler.backends.slurm.job import job_order
from reflux_scheduler.backends.slurm.rest import RestClient
from reflux_scheduler.backends.slurm.settings import SlurmSettings

_REMEMBERED_GRANTS = 100_000
_YAML = (".yaml", ".yml")


class SlurmBackend(Backend):
    """Every grant is one job of our user, named PREFIX-GRANT, so that the queue itself is the record of what we hold.

    A grant asked twice is one job: the name is looked up before it is submitted. A scheduler killed between the two
    leaves an sbatch behind that may arrive after the next look-up; `singleton` keeps the second job from running beside
    the first, and `grants` cancels it.
    """

    def __init__(self, settings: SlurmSettings, launch: AgentLaunch) -> None:
        """Raises ImportError when a topology.yaml is to be read and PyYAML is not installed."""
        if settings.topology_file.endswith(_YAML):
            importlib.import_module("yaml")
        if not settings.conf:
            settings = settings.model_copy(update={"conf": launch.environment.get("SLURM_CONF", "")})
        self._settings = settings
        self._launch = launch
        self._client: SlurmClient = RestClient(settings) if settings.rest_url else CommandClient(settings)
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._version: Version | None = None
        self._labels: Labels | None = None
        self._block = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def discover(self) -> Topology | None:
        labels = await self._topology_labels()
        settings = self._settings
        nodes = await self._client.nodes()
        return slurm_topology(await self._client.cluster(), nodes, labels, settings.levels, settings.partition)

    async def conditions(self) -> Mapping[str, NodeCondition]:
        # Jobs come and go between the answers: what is ours in either list of jobs is not foreign.
        before = await self._jobs()
        nodes = await self._client.nodes()
        after = await self._jobs()
        settings = self._settings
        used = [node for node in nodes if not settings.partition or settings.partition in node.partitions]
        return states.conditions(
            used,
            states.held([*after, *before]),
            avoid_foreign=settings.foreign_jobs == "avoid",
            reserved_is_ours=bool(settings.reservation),
        )

    async def request(self, grant: Grant) -> None:
        async with self._alone(grant.id):
            if grant.id in self._over or grant.id in states.by_grant(await self._jobs()):
                return
            await self._client.submit(await self._order(grant))

    async def release(self, grant_id: str) -> None:
        async with self._alone(grant_id):
            self._remember(grant_id)
            records = states.by_grant(await self._jobs()).get(grant_id, [])
            await self._client.cancel([record.id for record in records if states.cancellable(record)])

    async def grants(self) -> Mapping[str, GrantStatus]:
        found: dict[str, GrantStatus] = {}
        unwanted: list[int] = []
        for grant_id, records in states.by_grant(await self._jobs()).items():
            kept, extra = states.split_duplicates(records)
            unwanted += [record.id for record in extra if states.cancellable(record)]
            found[grant_id] = states.grant_status(grant_id, kept)
            if found[grant_id].state == "ended":
                self._remember(grant_id)
        await self._client.cancel(unwanted)
        return found

    async def _jobs(self) -> list[JobRecord]:
        return await self._client.jobs(f"{self._settings.job_prefix}-")

    async def _order(self, grant: Grant) -> JobOrder:
        if self._version is None:
            self._version = await self._client.version()
        labels = await self._topology_labels()
        leaf = self._settings.levels[0]
        leaves = {node: domains[leaf] for node, domains in labels.items() if leaf in domains}
        excludes = self._settings.pin == "exclude" or (self._block and self._settings.segment_size)
        others = [node.name for node in await self._client.nodes()] if excludes else []
        return job_order(
            grant, self._launch, self._settings, self._version, leaves, block=self._block, all_nodes=others
        )

    async def _topology_labels(self) -> Labels:
        if self._labels is None:
            settings = self._settings
            if settings.topology_file.endswith(_YAML):
                yaml = importlib.import_module("yaml")
                document = yaml.safe_load(await asyncio.to_thread(Path(settings.topology_file).read_text))
                self._block = any("block" in entry for entry in document or ())
                self._labels = parse_topology_yaml(document, settings.topology_name, settings.levels)
                return self._labels
            text = await self._topology_text()
            self._block = "BlockName=" in text
            self._labels = parse_topology_text(text, settings.levels)
        return self._labels

    async def _topology_text(self) -> str:
        if self._settings.topology_file:
            return await asyncio.to_thread(Path(self._settings.topology_file).read_text)
        return await self._client.topology()

    def _remember(self, grant_id: str) -> None:
        """Slurm forgets ended jobs after MinJobAge (5 minutes by default); an ended grant must not come back."""
        self._over[grant_id] = None
        while len(self._over) > _REMEMBERED_GRANTS:
            self._over.popitem(last=False)

    @asynccontextmanager
    async def _alone(self, grant_id: str) -> AsyncIterator[None]:
        """One call at a time per grant."""
        lock, users = self._locks.get(grant_id, (asyncio.Lock(), 0))
        self._locks[grant_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(grant_id)
            if users > 1:
                self._locks[grant_id] = (lock, users - 1)
