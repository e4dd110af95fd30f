"""One open client per replica process, opened when it is first needed."""

import asyncio

from reflux_inference_gateway.engines.base import ReplicaClient
from reflux_inference_gateway.engines.openai import OpenAiReplica
from reflux_inference_gateway.engines.torch import TorchReplica
from reflux_inference_gateway.replicas import ReplicaInfo
from reflux_kit.settings import ServiceSettings

_SAME_SEED_FOR_ALL = ("sglang",)
"""Engines that draw all n samples of a request from its one seed."""


class ReplicaClients:
    """Owns the clients; a replica that comes back under another address gets a new one."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._clients: dict[tuple[str, str], ReplicaClient] = {}

    def get(self, info: ReplicaInfo) -> ReplicaClient:
        """The client of a replica."""
        key = (info.name, info.grpc_address or info.http_url)
        if key not in self._clients:
            self._clients[key] = self._new(info)
        return self._clients[key]

    def torch(self, info: ReplicaInfo) -> TorchReplica:
        """The client of a replica that has a gRPC address."""
        client = self.get(info)
        assert isinstance(client, TorchReplica), f"{info.name} has no gRPC address"
        return client

    def _new(self, info: ReplicaInfo) -> ReplicaClient:
        if info.grpc_address:
            return TorchReplica(info.grpc_address, info.model_id, self._settings)
        return OpenAiReplica(info.http_url, info.model_id, seeds_samples=info.engine not in _SAME_SEED_FOR_ALL)

    async def forget_all_but(self, known: set[str]) -> None:
        """Closes clients of replicas whose name is not in `known`."""
        gone = [key for key in self._clients if key[0] not in known]
        await asyncio.gather(*(self._clients.pop(key).close() for key in gone))

    async def close(self) -> None:
        """Closes all."""
        await self.forget_all_but(set())
