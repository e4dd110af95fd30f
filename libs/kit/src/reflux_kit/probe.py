"""Health check for containers: `python -m reflux_kit.probe HOST:PORT` exits 0 when the server reports SERVING."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main() -> int:
    """Asks the server's overall health once, within 3 seconds."""
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(sys.argv[1]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.RpcError as error:
            print(f"{sys.argv[1]}: {error.code().name}", file=sys.stderr)
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
