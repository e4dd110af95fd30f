"""Owns the running attempts: starts new runs, takes up unfinished ones by itself, ends each with its cause."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import grpc

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux_kit.errors import InvalidRequest, NotFound, ServiceError, WrongState
from reflux_runs.config import RunConfig
from reflux_runs.load import load_file
from reflux_runs.preflight import preflight
from reflux_tasks.options import InvalidOption
from reflux_trainer.active import ActiveRun, end
from reflux_trainer.forking import FIXED, find_origin, forked_config
from reflux_trainer.hosts import host_memory
from reflux_trainer.jobs import cancel_job
from reflux_trainer.late.rewards import cancel_ladders
from reflux_trainer.metrics import RUNS_ACTIVE
from reflux_trainer.peers import Peers
from reflux_trainer.problems import catalog
from reflux_trainer.records import RunRecord
from reflux_trainer.shared import check_shared, sweep_fleets
from reflux_trainer.store import RunStore
from reflux_trainer.tenancy import Tenancy

log = logging.getLogger(__name__)
_STOP_SECONDS = 5.0
"""Time for ends of runs to get on record when the trainer stops."""


class Supervisor:
    """All runs of this trainer. Leaving its `async with` stops the attempts, not their runs.

    Enter it once the trainer's address is bound, so that a second trainer on the same address takes nothing over.
    """

    def __init__(self, peers: Peers, store: RunStore, tenancy: Tenancy) -> None:
        self._peers = peers
        self._store = store
        self._tenancy = tenancy
        self._admission = asyncio.Lock()
        """Held from the look at a tenant's runs until the new one is stored."""
        self._active: dict[str, ActiveRun] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Supervisor":
        for record in await self._store.unfinished():
            async with self._lock(record.run):
                if record.run not in self._active:
                    await self._take_up(record)
        self._sweeping = asyncio.create_task(sweep_fleets(self._peers), name="idle fleets")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        tasks = [active.task for active in self._active.values()]
        for active in self._active.values():
            active.stop()
        if tasks:
            late = (await asyncio.wait(tasks, timeout=_STOP_SECONDS))[1]
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_up(self, record: RunRecord) -> None:
        reached = await self._store.operation(record.run)
        fruitless = 0 if reached > record.reached else record.fruitless + 1
        if fruitless >= self._peers.settings.max_attempts:
            await self._cancel_peers(record)
            text = f"gave up after {fruitless} attempts without a new step: {record.message or 'the trainer restarted'}"
            await end(self._store, record.run, "FAILED", text, attempt=record.attempt)
            return

        def again(found: RunRecord) -> RunRecord:
            if found.ended or found.attempt != record.attempt:
                raise WrongState(f"run {record.run} was changed meanwhile")
            return replace(found.to("PENDING"), attempt=found.attempt + 1, reached=reached, fruitless=fruitless)

        try:
            taken = await self._store.update(record.run, again)
        except ServiceError as error:  # ended or taken over by another trainer in this moment
            log.info("not taking up run %s: %s", record.run, error)
            return
        log.info("taking up run %s, attempt %d", record.run, taken.attempt)
        self._begin(taken)

    def _lock(self, run: str) -> asyncio.Lock:
        """Whoever starts an attempt of `run` holds it."""
        lock = self._locks.get(run)
        if lock is None:
            lock = self._locks[run] = asyncio.Lock()
        return lock

    async def create(self, config: RunConfig, request_id: str) -> RunRecord:
        """Checks a configuration and starts its run; the same `request_id` gives the same run. Raises ConfigError."""
        await self._check(config)
        run = new_run_id(config, request_id, self._tenancy.caller)
        async with self._lock(run):
            return await self._create(run, config)

    async def fork(self, run: str, checkpoint: str, changes: Mapping[str, Any], request_id: str) -> RunRecord:
        """Starts a run of its own from a checkpoint of `run` ("" is the newest intact one), with changed settings.

        Raises NotFound, InvalidRequest or ConfigError.
        """
        source = await self._source(run)
        origin = await find_origin(self._peers, run, checkpoint)
        config = forked_config(source, changes, run, origin)
        await self._check(config)
        forked = new_run_id(config, request_id, self._tenancy.caller)
        async with self._lock(forked):
            return await self._create(forked, config, forked_from=origin.name)

    async def _source(self, run: str) -> RunConfig:
        """The configuration of a run that Redis or its folder remembers. Raises NotFound."""
        try:
            return (await self._store.get(run)).config
        except NotFound:
            path = self._peers.settings.runs_folder / run / "config.toml"
            if not path.is_file():
                raise NotFound(f"there is no run {run!r}, neither in Redis nor in {path.parent.parent}") from None
            return load_file(path)

    async def resume(self, run: str, config: RunConfig | None = None) -> RunRecord:
        """Continues a paused, failed or cancelled run, or one that only its checkpoints remember.

        Raises NotFound, WrongState or ConfigError.
        """
        async with self._lock(run):
            try:
                record = await self._store.get(run)
            except NotFound:
                return await self._resume_forgotten(run, config)
            if not record.ended:
                return await self.unpause(run)
            return await self._resume_ended(record, config or record.config)

    async def _resume_ended(self, record: RunRecord, config: RunConfig) -> RunRecord:
        run = record.run
        _check_continues(record.config, config)
        await self._check(config)
        if run in self._active:
            await asyncio.wait([self._active[run].task])
        reached = await self._store.operation(run)

        def again(found: RunRecord) -> RunRecord:
            # Read again: another trainer or request may have resumed it since.
            if not found.ended:
                raise WrongState(f"run {run} is {found.shown_state} already")
            pending = replace(found.to("PENDING"), paused=False, config=config, job="", fruitless=0, reached=reached)
            return replace(pending, attempt=found.attempt + 1)

        async with self._admission:
            self._tenancy.check_room(record.tenant, config, await self._store.unfinished())
            record = await self._store.update(run, again)
        self._begin(record)
        return record

    async def pause(self, run: str) -> RunRecord:
        """Closes the gate of a run that is under way. Raises WrongState."""

        def change(record: RunRecord) -> RunRecord:
            if record.state not in ("WARMING_UP", "RUNNING"):
                raise WrongState(f"run {run} is {record.shown_state}: only a running one can be paused")
            return replace(record, paused=True)

        record = await self._store.update(run, change)
        if run in self._active:
            self._active[run].control.pause()
        return record

    async def unpause(self, run: str) -> RunRecord:
        """Opens the gate again. Raises WrongState."""

        def change(record: RunRecord) -> RunRecord:
            if not record.paused:
                raise WrongState(f"run {run} is {record.shown_state}: there is nothing to resume")
            return replace(record, paused=False)

        record = await self._store.update(run, change)
        if run in self._active:
            self._active[run].control.resume()
        return record

    async def cancel(self, run: str) -> RunRecord:
        """Ends a run and waits until its processes are told. Raises WrongState when it has ended."""
        record = await self._store.get(run)
        if record.ended:
            raise WrongState(f"run {run} is {record.shown_state} already")
        active = self._active.get(run)
        if active is not None:
            active.cancel()
            await asyncio.wait([active.task])
            record = await self._store.get(run)
        if record.ended:
            return record
        # No attempt of this trainer runs it: its processes may still be there.
        await self._cancel_peers(record)
        return await end(self._store, run, "CANCELLED", "cancelled on request", attempt=record.attempt)

    async def _cancel_peers(self, record: RunRecord) -> None:
        """Ends what other services do for a run that no attempt runs here."""
        await cancel_job(self._peers, record.job)
        await cancel_ladders(self._peers.ladders, record.run, record.config.rl)

    async def _check(self, config: RunConfig) -> None:
        try:
            known = await asyncio.to_thread(catalog, config, self._peers.settings.cache_folder)
        except InvalidOption as error:
            raise InvalidRequest(f"task {config.task.name}: {error}", field=f"task.{error.key}") from None
        known = replace(known, host=await host_memory(self._peers.scheduler))
        log.info("preflight of %s: %s", config.name, "; ".join(preflight(config, known).lines()))
        await check_shared(self._peers, config)

    async def _create(self, run: str, config: RunConfig, attempt: int = 1, forked_from: str = "") -> RunRecord:
        folder = self._peers.settings.runs_folder.resolve() / run
        tenant = self._tenancy.caller
        made = RunRecord(run, config, created_at=time.time(), folder=str(folder), attempt=attempt, tenant=tenant)
        async with self._admission:
            if await self._store.knows(run):  # a repeated request, unless two ids collide
                record = self._tenancy.check_owner(await self._store.get(run))
            else:
                self._tenancy.check_room(tenant, config, await self._store.unfinished())
                record = await self._store.create(replace(made, forked_from=forked_from))
        if not record.ended and run not in self._active:
            self._begin(record)
        return record

    async def _resume_forgotten(self, run: str, config: RunConfig | None) -> RunRecord:
        config = config or await self._source(run)
        await self._check(config)
        # Above the attempt that wrote the checkpoint, or the catalog would fence this one.
        return await self._create(run, config, attempt=await self._checkpointed_attempt(run) + 1)

    async def _checkpointed_attempt(self, run: str) -> int:
        request = checkpoint_pb.GetLatestCheckpointRequest(run=run)
        try:
            return (await self._peers.checkpoint.GetLatestCheckpoint(request, timeout=30.0)).checkpoint.attempt
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            raise NotFound(f"run {run!r} is not in Redis and has no committed checkpoint to resume from") from None

    def _begin(self, record: RunRecord) -> None:
        active = self._active[record.run] = ActiveRun(record, self._peers, self._store)
        self._count(record.tenant)
        active.task.add_done_callback(lambda _: self._forget(active))

    def _forget(self, active: ActiveRun) -> None:
        if self._active.get(active.record.run) is active:
            del self._active[active.record.run]
            self._count(active.record.tenant)

    def _count(self, tenant: str) -> None:
        RUNS_ACTIVE.labels(tenant=tenant).set(sum(each.record.tenant == tenant for each in self._active.values()))


def new_run_id(config: RunConfig, request_id: str, tenant: str = "") -> str:
    """Name and a short hash of the request and who makes it, so that a repeated request finds its run."""
    made = f"{tenant}/{request_id}" if tenant else request_id
    return f"{config.name}-{hashlib.blake2b(made.encode(), digest_size=4).hexdigest()}"


_FIXED_RL = ("groups_per_step", "samples_per_group", "max_lag", "verifier")


def _check_continues(old: RunConfig, new: RunConfig) -> None:
    """A resumed run keeps its data and its counts; rates, limits and the number of steps may change."""
    changed = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    changed += [f"rl.{name}" for name in _FIXED_RL if getattr(old.rl, name) != getattr(new.rl, name)]
    if changed:
        raise InvalidRequest(
            f"a resumed run keeps {', '.join(changed)}: resume without a run file, or start a new run", field=changed[0]
        )
