"""What happens around every server call: token, deadline, trace context in; errors out as statuses."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import redis
from google.protobuf.message import DecodeError

from reflux_kit import auth, deadline, scope, telemetry
from reflux_kit.errors import DeadlinePassed, InvalidRequest, ServiceError, Unavailable

log = logging.getLogger(__name__)

_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_UNDECODABLE = object()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler; health and reflection need no token."""

    def __init__(self, stack_secret: str) -> None:
        self._secret = stack_secret

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        guard = _Guard(method, self._secret)
        handler = handler._replace(request_deserializer=_tolerant(handler.request_deserializer))
        if handler.unary_unary:
            return handler._replace(unary_unary=guard.unary(handler.unary_unary))
        if handler.unary_stream:
            return handler._replace(unary_stream=guard.stream(handler.unary_stream))
        if handler.stream_unary:
            return handler._replace(stream_unary=guard.upload(handler.stream_unary))
        return handler


def _tolerant(inner: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Undecodable bytes become a marker, so that the caller gets INVALID_ARGUMENT and the log no traceback."""

    def deserialize(raw: bytes) -> Any:
        assert inner is not None
        try:
            return inner(raw)
        except DecodeError:
            return _UNDECODABLE

    return deserialize if inner else None


class _Guard:
    def __init__(self, method: str, secret: str) -> None:
        self._method = method
        self._secret = secret

    def unary(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            try:
                self._enter(request, context)
                return await inner(request, context)
            except Exception as error:  # task boundary: everything leaves as a status
                await self._abort(context, error)

        return call

    def stream(self, inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                self._enter(request, context)
                async for response in inner(request, context):
                    yield response
            except Exception as error:  # task boundary: everything leaves as a status
                await self._abort(context, error)

        return call

    def upload(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def call(requests: AsyncIterator[Any], context: Any) -> Any:
            try:
                run = self._admit(context)
                return await inner(self._checked(requests, run), context)
            except Exception as error:  # task boundary: everything leaves as a status
                await self._abort(context, error)

        return call

    def _enter(self, request: Any, context: Any) -> None:
        self._check(request, self._admit(context))

    def _admit(self, context: Any) -> str:
        """The run that the caller's token is limited to, empty for the stack's own."""
        metadata = dict(context.invocation_metadata() or ())
        claims = auth.Claims("")
        if self._secret:
            claims = auth.from_header(self._secret, metadata.get("authorization"), tenants=True)
            if claims.tenant:
                scope.check_tenant(self._method)
        auth.tenant.set(claims.tenant)
        deadline.enter(context.time_remaining())
        telemetry.attach(metadata)
        return claims.run

    def _check(self, request: Any, run: str) -> None:
        if request is _UNDECODABLE:
            raise InvalidRequest(f"the request of {self._method} cannot be decoded")
        if run:
            scope.check(self._method, request, run)

    async def _checked(self, requests: AsyncIterator[Any], run: str) -> AsyncIterator[Any]:
        async for request in requests:
            self._check(request, run)
            yield request

    async def _abort(self, context: Any, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        known = self._known(error)
        if context.code() is grpc.StatusCode.UNIMPLEMENTED:
            # Generated servicers set it before they raise, for a method that nobody wrote.
            known = _Unimplemented(f"{self._method} is not offered by this service")
        if known is None:
            log.error("%s failed", self._method, exc_info=error)
            await context.abort(
                grpc.StatusCode.INTERNAL, f"{self._method} failed: {type(error).__name__}; see the server's log"
            )
        else:
            details = (("grpc-status-details-bin", known.to_status().SerializeToString()),)
            await context.abort(known.code, str(known), details)

    def _known(self, error: Exception) -> ServiceError | None:
        if isinstance(error, ServiceError):
            return error
        if isinstance(error, grpc.aio.AioRpcError):
            kind = DeadlinePassed if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else Unavailable
            return kind(f"{self._method} needs a peer that answered {error.code().name}: {error.details()}")
        if isinstance(error, redis.RedisError):
            return Unavailable(f"Redis does not answer ({type(error).__name__})", dependency="redis")
        if isinstance(error, TimeoutError):
            return DeadlinePassed(str(error) or f"{self._method} ran out of time")
        return None


class _Unimplemented(ServiceError):
    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"
