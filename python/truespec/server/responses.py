"""Small things every route uses: its service, and JSON replies."""

from __future__ import annotations

from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from .logprobs import JSONValue
from .service import Service
from .validation import validate

Model = TypeVar("Model", bound=BaseModel)


def service_of(request: Request) -> Service:
    """The server's parts."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def ready_service(request: Request) -> Service:
    """The server's parts once the engine can serve. Raises a 503 before that."""
    service = service_of(request)
    service.client.check_ready()
    return service


async def body_of(request: Request, model: type[Model]) -> Model:
    """The checked body. Raises `BadRequest`."""
    return validate(model, await request.body())


def json_response(data: JSONValue, status: int = 200) -> Response:
    """Strict JSON: orjson writes no NaN and no Infinity, and finite() keeps them out."""
    return Response(orjson.dumps(data), status, media_type="application/json")
