"""One open client per replica process, opened when it is first needed."""

import asyncio

from reflux_inference_gateway.engines.base import ReplicaClient
from reflux_inference_gateway.engines.torch import TorchReplica
from reflux_inference_gateway.replicas import ReplicaInfo
from reflux_kit.settings import ServiceSettings


class ReplicaClients:
    """Owns the clients; a replica that comes back under another address gets a new one."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._clients: dict[tuple[str, str], ReplicaClient] = {}

    def get(self, info: ReplicaInfo) -> ReplicaClient:
        """The client of a replica."""
        key = (info.name, info.grpc_address)
        if key not in self._clients:
            self._clients[key] = TorchReplica(info.grpc_address, self._settings)
        return self._clients[key]

    async def forget_all_but(self, known: set[str]) -> None:
        """Closes clients of replicas whose name is not in `known`."""
        gone = [key for key in self._clients if key[0] not in known]
        await asyncio.gather(*(self._clients.pop(key).close() for key in gone))

    async def close(self) -> None:
        """Closes all."""
        await self.forget_all_but(set())
