"""Entry point of the scheduler: settings in, servicer out."""

import gc
import os
import socket
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from reflux.scheduler.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server
from reflux_kit.errors import StartupError
from reflux_kit.redis import open_redis
from reflux_kit.server import Bound, Mount, Service, serve
from reflux_kit.settings import ServiceSettings, prefix
from reflux_placement.errors import InvalidQueue, InvalidTopology
from reflux_placement.policy.cycle import DEFAULT_CONFIG
from reflux_placement.policy.health import DEFAULT_DAMPING, Damping
from reflux_placement.policy.quota import check_queues
from reflux_placement.policy.view import Queue
from reflux_placement.sources.toml import Cluster, TopologyFileError, read_cluster
from reflux_placement.topology import Resources, Topology
from reflux_scheduler.backends import BACKENDS, BackendName
from reflux_scheduler.backends.base import AgentLaunch, Backend, BackendAway
from reflux_scheduler.candidate import Candidate, Plan
from reflux_scheduler.errors import ConfigurationError
from reflux_scheduler.fleet import Terms
from reflux_scheduler.machine import this_machine, toy_rack
from reflux_scheduler.planner import Rules
from reflux_scheduler.queues import default_queues, read_queues
from reflux_scheduler.servicer import SERVICE_NAME, SchedulerServicer


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler, REFLUX_SCHEDULER_*."""

    model_config = prefix("scheduler")

    listen: str = "127.0.0.1:7001"

    backend: BackendName = "local"
    """Cluster that jobs run on."""

    backend_options: str = ""
    """TOML file with the options of the backend (the fields of its settings class); empty takes the defaults."""

    topology: str = ""
    """TOML file with the tree, configs/topologies/ has examples; empty asks the backend, and `local` describes this
    machine as a toy rack."""

    queues: str = ""
    """TOML file with queues, quotas and the policy's knobs; empty is one queue without bounds."""

    lease_seconds: float = Field(default=60.0, gt=0)
    """An agent without a scheduler stops its members after this long."""

    heartbeat_seconds: float = Field(default=2.0, gt=0)
    """How often agents report."""

    lost_margin_seconds: float = Field(default=15.0, ge=0)
    """How much longer than the lease a silent node is waited for before its jobs go on elsewhere."""

    start_seconds: float = Field(default=600.0, gt=0)
    """A gang whose room was given runs within this time, or it is tried again elsewhere."""

    grant_seconds: float = Field(default=3600.0, gt=0)
    """Room that the cluster does not give within this time is given up: the job is placed anew, with what the cluster
    says of its nodes by then."""

    move_loss_seconds: float = Field(default=600.0, ge=0)
    """A job is moved (to mend fragmentation, or off a draining node) only this soon after a checkpoint: most work that
    a move may lose."""

    node_drain_seconds: float = Field(default=3600.0, ge=0)
    """What has not left a draining node after this long leaves it all the same, whatever it loses; 0 is at once."""

    flap_failures: float = Field(default=2.0, gt=0)
    """A node that failed more often than this of late gets no new work ("flapping"). What counts is that its agent was
    replaced without having been told to stop, or stayed away; each failure counts for less as time passes."""

    flap_reuse: float = Field(default=0.75, gt=0)
    """A flapping node gets work again once its failures count for less than this."""

    flap_half_life_seconds: float = Field(default=300.0, gt=0)
    """Time of being up in which failures count for half."""

    flap_longest_seconds: float = Field(default=900.0, gt=0)
    """A flapping node that stays up gets work again after this long at the latest."""

    poll_seconds: float = Field(default=2.0, gt=0)
    """How often the cluster is asked about grants and nodes."""

    leader_seconds: float = Field(default=6.0, gt=0)
    """Another scheduler takes over when the leader was silent for this long."""


@asynccontextmanager
async def build(
    settings: SchedulerSettings,
    environment: Mapping[str, str] | None = None,
    loaded: Callable[[], None] = lambda: None,
) -> AsyncIterator[Service]:
    """Owns the connection to Redis, the backend and the candidate. Agents that a backend starts get `environment`;
    `loaded` is called at the start of each reign."""
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(open_redis(settings.redis_url))
        backend = await stack.enter_async_context(_backend(settings, environment or {}))
        candidate = Candidate(redis, await _plan(settings, backend), backend, settings, loaded)
        servicer = SchedulerServicer(candidate)
        mount = Mount(servicer, add_SchedulerServiceServicer_to_server, SERVICE_NAME)

        def attend(bound: Bound) -> AbstractAsyncContextManager[None]:
            # The lease is asked for once the address is ours: a second process at it must not take it over.
            return candidate.standing(bound.grpc, f"{bound.grpc}@{socket.gethostname()}")

        yield Service((mount,), attend=attend)


@asynccontextmanager
async def _backend(settings: SchedulerSettings, environment: Mapping[str, str]) -> AsyncIterator[Backend]:
    launch = AgentLaunch((sys.executable, "-m", "reflux_scheduler.agent.main"), _for_agents(environment, settings))
    try:
        backend = BACKENDS[settings.backend](_options(settings.backend_options), launch)
    except ImportError as error:
        extra = f"pip install reflux-scheduler[{settings.backend}]"
        raise StartupError(f"backend {settings.backend} needs {error.name or error}: {extra}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise StartupError(f"{settings.backend_options or 'defaults'}: {key}: {first['msg']}") from None
    except ValueError as error:
        raise StartupError(f"{settings.backend_options}: {error}") from None
    async with AsyncExitStack() as stack:
        if isinstance(backend, AbstractAsyncContextManager):
            await stack.enter_async_context(backend)
        yield backend


def _for_agents(environment: Mapping[str, str], settings: SchedulerSettings) -> dict[str, str]:
    """What agents that a backend starts inherit: not where this host's services listen, because several agents may
    share a node."""
    passed = {
        key: value
        for key, value in environment.items()
        if not key.startswith("REFLUX_SCHEDULER_") and not (key.startswith("REFLUX_") and key.endswith("_LISTEN"))
    }
    return {**passed, "REFLUX_SCHEDULER_ADDRESS": settings.scheduler_address}


def _options(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read ({error.strerror}); set REFLUX_SCHEDULER_BACKEND_OPTIONS") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: is not TOML ({error})") from None


async def _plan(settings: SchedulerSettings, backend: Backend) -> Plan:
    cluster = await _cluster(settings, backend)
    try:
        queues, config = read_queues(Path(settings.queues)) if settings.queues else (default_queues(), None)
    except ConfigurationError as error:
        raise StartupError(str(error)) from None
    _check_queues(settings, queues, cluster.topology)
    rules = Rules(
        queues=queues,
        config=config or DEFAULT_CONFIG,
        grant_seconds=settings.grant_seconds,
        move_loss_seconds=settings.move_loss_seconds,
        node_drain_seconds=settings.node_drain_seconds,
        shared_agents=backend.shared_agents,
    )
    return Plan(
        topology=cluster.topology,
        spares=cluster.spares,
        rules=rules,
        flaps=_flaps(settings),
        terms=Terms(settings.lease_seconds, settings.heartbeat_seconds, settings.lost_margin_seconds),
        start_seconds=settings.start_seconds,
        poll_seconds=settings.poll_seconds,
        leader_seconds=settings.leader_seconds,
        backend_name=settings.backend,
    )


def _flaps(settings: SchedulerSettings) -> Damping:
    unit = DEFAULT_DAMPING.penalty
    try:
        return Damping(
            suppress=settings.flap_failures * unit,
            reuse=settings.flap_reuse * unit,
            half_life_seconds=settings.flap_half_life_seconds,
            longest_seconds=settings.flap_longest_seconds,
        )
    except ValueError as error:
        raise StartupError(f"REFLUX_SCHEDULER_FLAP_*: {error}") from None


def _check_queues(settings: SchedulerSettings, queues: Mapping[str, Queue], topology: Topology) -> None:
    gpus, millicpus, memory_bytes = topology.capacity_NR.sum(axis=0).tolist()
    try:
        check_queues(queues, Resources(gpus, millicpus, memory_bytes))
    except InvalidQueue as error:
        raise StartupError(f"{settings.queues}: {error}") from None


async def _cluster(settings: SchedulerSettings, backend: Backend) -> Cluster:
    """The file, else what the cluster says of itself, else this machine."""
    if settings.topology:
        try:
            return read_cluster(Path(settings.topology), auto=this_machine())
        except TopologyFileError as error:
            raise StartupError(str(error)) from None
    try:
        topology = await backend.discover()
    except BackendAway as error:
        raise StartupError(f"the {settings.backend} cluster does not answer: {error}") from None
    except InvalidTopology as error:
        raise StartupError(
            f"what the {settings.backend} cluster tells is no topology: {error}; "
            "mend its labels or name a file in REFLUX_SCHEDULER_TOPOLOGY"
        ) from None
    if topology is None and not backend.shared_agents:
        raise StartupError(
            f"the {settings.backend} cluster tells no topology: name a file in REFLUX_SCHEDULER_TOPOLOGY"
        )
    return Cluster(topology or toy_rack())


_GC_THRESHOLDS = (10_000, 20, 50)
"""Full collections are rare: one takes 12 ms when gangs of a thousand members come and go."""


def settle_memory() -> None:
    """What was taken over stays for long: a full collection that walks all of it would stop answers for 0.1 s. What an
    earlier reign of this process knew is collected. For a process that does nothing else."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def main() -> None:
    """Runs the scheduler until SIGTERM or SIGINT."""
    environment = dict(os.environ)
    serve("scheduler", SchedulerSettings, lambda settings: build(settings, environment, settle_memory))


if __name__ == "__main__":
    main()
