"""The processes of a base model: one learner and some replicas, a job of the scheduler, started on first use."""

import asyncio
import json
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import grpc

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1 import replica_pb2
from reflux.scheduler.v1 import job_pb2
from reflux_kit import auth
from reflux_kit.errors import StartupError
from reflux_kit.scope import ADAPTERS
from reflux_trainer.jobs import role
from reflux_trainer.peers import Peers
from reflux_trainer.standing import StandingJob

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base model as the settings and its folder describe it."""

    name: str
    folder: Path
    max_context: int
    """Tokens, prompt and generated ones."""
    vocab_size: int
    architecture: str

    @property
    def run(self) -> str:
        """Id under which its processes are known; what they may do is limited to it."""
        return f"tinker-{blake2b(self.name.encode(), digest_size=6).hexdigest()}"

    def slot(self, index: int) -> str:
        """Model id of replica `index`, which serves one sampler's weights at a time."""
        return f"{self.run}{ADAPTERS}slot-{index}"


def read_base(name: str, folder: Path) -> Base:
    """Reads a base's config.json. Raises `StartupError` naming what is wrong with it."""
    try:
        config = json.loads((folder / "config.json").read_text())
        architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
        context, vocabulary = int(config.get("max_position_embeddings", 2048)), int(config["vocab_size"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StartupError(
            f"REFLUX_TINKER_BASE_MODELS: {name}: {folder} is not a model folder ({type(error).__name__}: {error})"
        ) from None
    return Base(name=name, folder=folder, max_context=context, vocab_size=vocabulary, architecture=str(architecture))


class Fleet:
    """Owns the job of one base model."""

    def __init__(self, base: Base, peers: Peers, replicas: int, weight_dtype: str, start_seconds: float) -> None:
        self.base = base
        self._peers, self._replicas = peers, replicas
        self._weight_dtype, self._start_seconds = weight_dtype, start_seconds
        self._job = StandingJob(peers, f"tinker:job:{base.run}", base.run, self._roles)
        self.used_at = time.monotonic()
        peers.learners.expected.add(base.run)

    async def ensure(self) -> None:
        """Returns when the base's job exists. Raises Unavailable with the scheduler's words when it cannot."""
        self.used_at = time.monotonic()
        await self._job.ensure()

    def _roles(self) -> list[job_pb2.RoleSpec]:
        roles = [self._role("learner", "learner", {})]
        for index in range(self._replicas):
            extra = {"REFLUX_ENGINE_MODEL_ID": self.base.slot(index)}
            roles.append(self._role(f"engine-{index}", "engine", extra))
        return roles

    def _role(self, name: str, kind: str, extra: dict[str, str]) -> job_pb2.RoleSpec:
        environment = {
            "REFLUX_RUN": self.base.run,
            "REFLUX_ENGINE_MODEL": str(self.base.folder.resolve()),
            "REFLUX_ENGINE_DTYPE": self._weight_dtype,
            **extra,
        }
        if secret := self._peers.settings.stack_secret:
            environment["REFLUX_TOKEN"] = auth.mint(secret, kind, self.base.run)
        return role(name, kind, environment)

    async def replica_ready(self, index: int) -> bool:
        """Waits a while for a replica; False when it is still not there."""
        end = time.monotonic() + self._start_seconds
        request = gateway_pb.ListReplicasRequest(model_id=self.base.slot(index))
        while time.monotonic() < end:
            await self.ensure()
            try:
                replicas = (await self._peers.gateway.ListReplicas(request, timeout=5.0)).replicas
            except grpc.aio.AioRpcError:
                replicas = ()
            if any(replica.state == replica_pb2.Replica.STATE_READY for replica in replicas):
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def stop(self) -> None:
        """Gives the processes back; the next use starts others."""
        if await self._job.stop():
            self._peers.learners.forget(self.base.run)
