"""Domain errors that services raise; the server turns them into gRPC statuses."""

from typing import ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "reflux"


class StartupError(Exception):
    """The service cannot start as it is configured; `serve` prints the message as one line and exits with status 2."""


class ServiceError(Exception):
    """Base of the errors that a client can act on.

    `reason` is the machine-readable half of the contract (AIP-193): the text may change, it may not.
    """

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.metadata = metadata

    def to_status(self) -> status_pb2.Status:
        """The error as a google.rpc.Status with exactly one ErrorInfo."""
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        return status_pb2.Status(code=self.code.value[0], message=str(self), details=[detail])


class InvalidRequest(ServiceError, ValueError):
    """The request can never succeed as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class NotFound(ServiceError, LookupError):
    """The named resource does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    """Another resource has this name."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"


class WrongState(ServiceError):
    """The resource exists, but its state does not allow the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WRONG_STATE"


class Conflict(ServiceError):
    """Lost against a concurrent call; the caller may start over one level up."""

    code = grpc.StatusCode.ABORTED
    reason = "CONFLICT"


class CapacityExhausted(ServiceError):
    """Nothing fits now; the same request may fit later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "CAPACITY_EXHAUSTED"


class Unavailable(ServiceError):
    """A dependency is away; the same call may succeed soon."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class DeadlinePassed(ServiceError, TimeoutError):
    """The call's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_PASSED"


class Unauthenticated(ServiceError):
    """No token, or one that the stack secret did not sign."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(ServiceError):
    """The token is good, but not for this: it belongs to another run, or the call is for operators."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason of a failed call, or "" when the peer sent none."""
    return _info(error).reason


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The ErrorInfo metadata of a failed call, for example where the leader is."""
    return dict(_info(error).metadata)


def _info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            details = status_pb2.Status.FromString(value).details
            if details and details[0].Unpack(info):
                break
    return info
