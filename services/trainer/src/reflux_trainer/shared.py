"""Engines that several runs share: a standing job per fleet name, and a run's seats on its replicas.

What a fleet is made of, the first run that uses it decides; Redis keeps it while the fleet stands.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
from redis.exceptions import RedisError

from reflux.inference_gateway.v1 import engine_service_pb2 as engine_pb
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1 import replica_pb2
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceStub
from reflux.scheduler.v1 import job_pb2
from reflux_kit.channel import open_channel
from reflux_kit.errors import ServiceError
from reflux_kit.scope import ADAPTERS
from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError, Refusal
from reflux_trainer.jobs import role
from reflux_trainer.model_source import ADAPTER
from reflux_trainer.peers import Peers
from reflux_trainer.standing import StandingJob

log = logging.getLogger(__name__)

_FLEETS = "shared:fleets"
"""Hash in Redis: what each fleet is made of, and when a run last held a seat there."""
_LEASE_SECONDS = 45.0
_RENEW_SECONDS = 10.0
_STARTING_SECONDS = 0.5
_CALL_SECONDS = 10.0
_SWEEP_SECONDS = 10.0
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


class SeatRefused(RuntimeError):
    """The shared fleet will never take the run's adapter; the text is the engine's."""


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """What a shared fleet is made of."""

    folder: str
    weight_dtype: str
    engines: int
    used_at: float = 0.0
    """Unix time in seconds at which a run last held a seat."""


def served_model(run: str, config: RunConfig) -> str:
    """Model id under which broker and gateway know what a run trains."""
    return f"{run}{ADAPTERS}{ADAPTER}" if config.fleet.shared else run


async def check_shared(peers: Peers, config: RunConfig) -> None:
    """Refuses what the fleet that a run file names cannot serve. Raises ConfigError."""
    name, most = config.fleet.shared, peers.settings.shared_max_rank
    if not name:
        return
    refusals = []
    if config.model.lora_rank > most:
        reason = f"adapters of shared fleets have at most {most} ranks (REFLUX_TRAINER_SHARED_MAX_RANK)"
        refusals.append(Refusal("model.lora_rank", config.model.lora_rank, reason, str(most)))
    wanted, known = _spec(config), await _known(peers, name)
    if known is not None and known.folder != wanted.folder:
        reason = f"the shared fleet {name} serves another model"
        refusals.append(Refusal("model.path", config.model.path, reason, f'"{known.folder}", or another fleet.shared'))
    if known is not None and known.weight_dtype != wanted.weight_dtype:
        reason = f"the shared fleet {name} computes in another type"
        refusals.append(
            Refusal("fleet.weight_dtype", wanted.weight_dtype, reason, f'"{known.weight_dtype}", or another fleet')
        )
    if refusals:
        raise ConfigError(tuple(refusals))


class SharedSeats:
    """Owns the seats of one run's adapter on the replicas of a shared fleet."""

    def __init__(self, run: str, config: RunConfig, peers: Peers) -> None:
        self._config, self._peers = config, peers
        self._model = served_model(run, config)
        self._name = config.fleet.shared
        self._fleet = f"shared-{self._name}"
        self._spec = _spec(config)
        self._job = standing_job(peers, self._name, lambda: self._spec)
        self._held: set[str] = set()
        """Addresses of the replicas that have given a seat."""
        self.why = f"no replica of the shared fleet {self._name} is there yet"
        """Why the run has no seat, as far as is known."""

    @property
    def wanted(self) -> int:
        """Replicas that the fleet has when all are there."""
        return self._spec.engines

    async def keep(self) -> None:
        """Takes seats and renews their leases until it is cancelled. Raises `SeatRefused` or ConfigError."""
        while True:
            try:
                await self._start()
                await self._attach()
            except (ServiceError, RedisError) as error:
                self.why = str(error)
                log.warning("the shared fleet %s: %s", self._name, error)
            await asyncio.sleep(_RENEW_SECONDS if len(self._held) >= self.wanted else _STARTING_SECONDS)

    async def release(self) -> None:
        """Gives the seats back; an engine that does not answer frees its own when the lease ends."""
        request = engine_pb.DetachAdapterRequest(model_id=self._model)
        for address in sorted(self._held):
            try:
                async with open_channel(address, self._peers.settings, subject="trainer") as channel:
                    await EngineServiceStub(channel).DetachAdapter(request, timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.info("%s keeps the seat of %s until its lease ends: %s", address, self._model, error.details())
        self._held.clear()

    async def _start(self) -> None:
        """The fleet stands, made of what its first run wanted, and is in use."""
        await check_shared(self._peers, self._config)
        self._spec = replace(await _known(self._peers, self._name) or self._spec, used_at=time.time())
        await self._peers.redis.hset(_FLEETS, self._name, json.dumps(asdict(self._spec)))
        await self._job.ensure()

    async def _attach(self) -> None:
        addresses = await self._replicas()
        self._held &= addresses
        for address in sorted(addresses):
            try:
                async with open_channel(address, self._peers.settings, subject="trainer") as channel:
                    await EngineServiceStub(channel).AttachAdapter(self._request(), timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                self._held.discard(address)
                self.why = f"the shared fleet {self._name}: {error.details()}"
                if error.code() in _REFUSED:
                    raise SeatRefused(self.why) from None
            else:
                self._held.add(address)

    async def _replicas(self) -> set[str]:
        request = gateway_pb.ListReplicasRequest(model_id=self._fleet)
        try:
            replicas = (await self._peers.gateway.ListReplicas(request, timeout=5.0)).replicas
        except grpc.aio.AioRpcError as error:
            self.why = f"the gateway does not list replicas of the shared fleet: {error.details()}"
            return set(self._held)
        return {each.grpc_address for each in replicas if each.state == replica_pb2.Replica.STATE_READY}

    def _request(self) -> engine_pb.AttachAdapterRequest:
        model = self._config.model
        targets = model.lora_targets.split("+")
        return engine_pb.AttachAdapterRequest(
            model_id=self._model,
            rank=model.lora_rank,
            train_attention="attention" in targets,
            train_mlp="mlp" in targets,
            train_unembed="unembed" in targets,
            lease_seconds=_LEASE_SECONDS,
        )


def standing_job(peers: Peers, name: str, spec: Callable[[], FleetSpec]) -> StandingJob:
    """The job of a shared fleet."""

    def roles() -> list[job_pb2.RoleSpec]:
        settings, made = peers.settings, spec()
        # No token of a run: these engines work for many, and call with one of the stack's.
        environment = {
            "REFLUX_RUN": f"shared-{name}",
            "REFLUX_ENGINE_MODEL": made.folder,
            "REFLUX_ENGINE_MODEL_ID": f"shared-{name}",
            "REFLUX_ENGINE_DTYPE": made.weight_dtype,
            "REFLUX_ENGINE_MAX_ADAPTERS": str(settings.shared_adapters),
            "REFLUX_ENGINE_MAX_ADAPTER_RANK": str(settings.shared_max_rank),
        }
        return [role("engine", "engine", environment, made.engines)]

    return StandingJob(peers, f"shared:job:{name}", f"shared-{name}", roles)


async def sweep_fleets(peers: Peers) -> None:
    """Ends idle fleets from time to time until it is cancelled."""
    idle_seconds = peers.settings.shared_idle_seconds
    while True:
        await asyncio.sleep(min(_SWEEP_SECONDS, idle_seconds))
        try:
            await end_idle_fleets(peers, idle_seconds)
        except (RedisError, OSError) as error:
            log.warning("a sweep of shared fleets broke off, the next one goes on: %s", error)


async def end_idle_fleets(peers: Peers, idle_seconds: float) -> None:
    """Gives back the processes of fleets where no run has held a seat for that long."""
    for raw in await peers.redis.hkeys(_FLEETS):
        name = raw.decode()
        spec = await _known(peers, name)
        if spec is not None and time.time() - spec.used_at > idle_seconds:
            await standing_job(peers, name, lambda spec=spec: spec).stop()
            await peers.redis.hdel(_FLEETS, name)


async def _known(peers: Peers, name: str) -> FleetSpec | None:
    raw = await peers.redis.hget(_FLEETS, name)
    return FleetSpec(**json.loads(raw)) if raw else None


def _spec(config: RunConfig) -> FleetSpec:
    fleet = config.fleet
    folder = str(Path(config.model.path).resolve())
    return FleetSpec(folder=folder, weight_dtype=fleet.weight_dtype, engines=max(1, fleet.engines))
