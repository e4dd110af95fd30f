"""Pretended replicas at our gateway: registered and kept alive over gRPC as real ones are."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.inference_gateway.v1.replica_pb2 import Replica

_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class Registered:
    """A worker: its name, the base of its HTTP API, its gRPC address if it has one, the rows that it says it has."""

    name: str
    url: str
    grpc: str = ""
    capacity: int = 0


@contextmanager
def registered(gateway: str, token: str, model: str, workers: Sequence[Registered]) -> Iterator[None]:
    """Registers the workers and sends their heartbeats from a thread until the block ends."""
    metadata, done = (("authorization", f"Bearer {token}"),), threading.Event()
    replicas = [
        Replica(
            name=f"replicas/{worker.name}",
            model_id=model,
            http_url=worker.url,
            grpc_address=worker.grpc,
            role=Replica.ROLE_BOTH,
            health=Replica.HEALTH_OK,
            capacity=worker.capacity,
            engine="torch" if worker.grpc else "vllm",
        )
        for worker in workers
    ]
    with grpc.insecure_channel(gateway) as channel:
        stub = InferenceGatewayServiceStub(channel)
        seconds = 1.0
        for replica in replicas:
            request = pb.RegisterReplicaRequest(replica=replica)
            seconds = stub.RegisterReplica(request, timeout=_CALL_SECONDS, metadata=metadata).heartbeat_seconds

        def keep_alive() -> None:
            while not done.wait(seconds):
                for replica in replicas:
                    stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=_CALL_SECONDS, metadata=metadata)

        thread = threading.Thread(target=keep_alive, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
