"""Errors as clients see them: one body shape with OpenAI's types on every route."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson
from starlette.responses import Response

from truespec.tokenizer.errors import BadRequest

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """A request that ends with an error status.

    Attributes:
        status: HTTP status.
        message: what was wrong and what would be right.
        param: the first bad field.
        code: machine-readable reason.
        headers: sent with the reply, like `retry-after`.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as JSON data."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The error as a reply."""
        body = orjson.dumps(self.body)
        return Response(body, self.status, self.headers, media_type="application/json")


def from_bad_request(error: BadRequest) -> ApiError:
    """A 400 that lists every bad field, with `param` the first."""
    message = "; ".join(problem.message for problem in error.problems)
    return ApiError(400, message, error.param, "invalid_value")


def not_found(message: str, param: str | None = None) -> ApiError:
    """A 404."""
    return ApiError(404, message, param, "not_found")


def queue_full(num_open: int, limit: int) -> ApiError:
    """A 429 that asks the client to come back in a second."""
    message = f"{num_open} requests are running or waiting, at most {limit} are taken"
    return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})


def unavailable(message: str, code: str) -> ApiError:
    """A 503: the engine is starting or gone."""
    return ApiError(503, message, code=code, headers={"retry-after": "1"})
