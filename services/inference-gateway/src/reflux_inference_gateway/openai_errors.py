"""OpenAI's error object, shared by the gateway's and the engine's HTTP doors."""

import json

from aiohttp import web

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An HTTP answer other than 200, as OpenAI clients expect it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.allow = allow
        """Methods that the path takes, with status 405."""

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object of the answer, and of a stream's error event."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, fallback)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """That object as JSON."""
        return json.dumps(self.body()).encode()

    def response(self) -> web.Response:
        """The whole answer."""
        headers = {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}
        return web.json_response(self.body(), status=self.status, headers=headers)
