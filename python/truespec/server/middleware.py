"""What every request passes: its id, its key, the size of its body. Plain ASGI, for speed."""

from __future__ import annotations

import hmac
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

MAX_BODY_BYTES = 64 * 2**20
OPEN_PATHS = ("/health", "/ready", "/metrics")
_MAX_ID_CHARS = 200


class Gate:
    """Gives each request an id, refuses wrong keys and bodies that are too large."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-request-id", request_id)
            await send(message)

        problem = self._problem(scope, headers)
        if problem is not None:
            await problem.response()(scope, receive, send_with_id)
            return
        await self._app(scope, _limited(receive), send_with_id)

    def _problem(self, scope: Scope, headers: Headers) -> ApiError | None:
        if self._api_key is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
            if scope["method"] != "OPTIONS" and not hmac.compare_digest(given, self._api_key):
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return _too_large()
        return None


def _limited(receive: Receive) -> Receive:
    """`receive` that also counts bodies whose length was not announced."""
    num_bytes = 0

    async def counting() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counting


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "body", "too_large")


def _request_id(given: str | None) -> str:
    """The client's id where it is usable as a header, else a new one."""
    if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)
