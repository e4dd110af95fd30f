"""What the replica says about itself, and why it would end."""

import logging
import re
import signal
import socket
import uuid
from typing import TYPE_CHECKING

from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_kit.scope import run_of
from reflux_kit.server import Bound

if TYPE_CHECKING:  # The adapter of foreign engines takes `Fatal` from here, and it runs without torch.
    from reflux_inference_gateway.engine.loop import EngineLoop
    from reflux_inference_gateway.engine.served import CoreOptions

log = logging.getLogger(__name__)

_WILDCARDS = ("0.0.0.0", "[::]")


def replica_name(owner: str, rank: int) -> str:
    """A new resource name: the owner's (a run, or what it is called without one) as far as the gateway takes it."""
    return f"replicas/{re.sub(r'[^A-Za-z0-9._-]', '-', owner)[:80]}-{rank}-{uuid.uuid4().hex[:8]}"


class Fatal:
    """Owns the reason for which the process must end with status 1; its supervisor starts another one."""

    def __init__(self) -> None:
        self.reason = ""

    def __call__(self, reason: str) -> None:
        """Ends the process in order: open requests get an error, the gateway a deregistration."""
        log.error("ends: %s", reason)
        self.reason = reason
        signal.raise_signal(signal.SIGTERM)


class Description:
    """Owns what the replica says about itself; complete once the addresses are bound."""

    def __init__(
        self, settings: EngineSettings, model_id: str, options: "CoreOptions", engine: "EngineLoop", adapter: str = ""
    ) -> None:
        """`adapter` is the engine's name of the model, where it is not its own."""
        self._settings, self._options, self._adapter = settings, options, adapter
        self._process = self
        self.role = ReplicaMessage.Role.Value(f"ROLE_{settings.role.upper()}")
        self._fixed = ReplicaMessage(
            name=replica_name(adapter or settings.run or "engine", settings.rank),
            model_id=model_id,
            capacity=options.max_rows,
            node=settings.node,
            run=settings.run,
            engine="torch",
        )
        self._engine = engine
        self.fault = ""
        """What others found wrong with this replica's answers; empty when nothing is."""

        self._host = settings.advertise_host

    @property
    def name(self) -> str:
        """Resource name of this process."""
        return self._fixed.name

    def bind(self, bound: Bound) -> None:
        """Fills in the addresses."""
        self._fixed.grpc_address = self._reachable(bound.grpc)
        self._fixed.http_url = f"http://{self._reachable(bound.http)}" if bound.http else ""

    def beside(self, adapter: str) -> "Description":
        """Of an adapter that this process serves: an entry of its own, at the address of this one.

        It has no HTTP door: that one answers for the engine's own model.
        """
        other = Description(self._settings, adapter, self._options, self._engine, adapter)
        other._process = self._process
        other._fixed.grpc_address, other._fixed.run = self._fixed.grpc_address, run_of(adapter)
        return other

    def _reachable(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        if host in _WILDCARDS:
            host = socket.gethostname()
        return f"{self._host or host}:{port}"

    def __call__(self) -> ReplicaMessage:
        """The replica at this moment; the load is that of the whole process."""
        load = self._engine.load()
        message = ReplicaMessage()
        message.CopyFrom(self._fixed)
        message.role = self._process.role
        weights = self._engine.serves(self._adapter)
        if weights is not None:
            message.version, message.epoch = weights.version, weights.epoch
        fault = self._engine.unfit or self.fault or ("" if weights else "no version has come yet")
        message.health = ReplicaMessage.HEALTH_UNHEALTHY if fault else ReplicaMessage.HEALTH_OK
        message.health_reason = fault
        message.sequences, message.pending_tokens = load.running + load.waiting, load.pending_tokens
        return message
