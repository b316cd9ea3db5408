"""The ASGI application: routes, error bodies, the schema behind /docs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from truespec.tokenizer.errors import BadRequest

from . import control_routes, info_routes, native_routes, openai_routes, token_routes
from .errors import ApiError, from_bad_request
from .middleware import Gate
from .native_models import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenGenerateRequest,
    TokenizeRequest,
)
from .openai_models import ChatRequest, CompletionRequest
from .service import Service
from .streaming import CLIENT_CLOSED

ROUTERS = (
    openai_routes.router,
    native_routes.router,
    token_routes.router,
    control_routes.router,
    info_routes.router,
)
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/inference/v1/generate": TokenGenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
}
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    service: Service, background: Callable[[], AbstractAsyncContextManager[None]]
) -> Gate | CORSMiddleware:
    """The application.

    Args:
        service: shared by all routes.
        background: runs while the server does, like the engine's client.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with background():
            yield

    app = FastAPI(title="truespec", version=version("truespec"), lifespan=lifespan)
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _internal_error)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]  # FastAPI's documented way
    gate = Gate(app, service.config.api_key)
    if service.config.allow_origin is None:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=[service.config.allow_origin],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return from_bad_request(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


async def _client_left(request: Request, error: Exception) -> Response:
    return ApiError(CLIENT_CLOSED, "the client left").response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed to answer this request", code="internal").response()


def _schema(app: FastAPI) -> dict[str, object]:
    """FastAPI's schema, with the bodies that the routes read themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in BODIES.values()],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, model in BODIES.items():
            reference = {"$ref": f"#/components/schemas/{model.__name__}"}
            schema["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        app.openapi_schema = schema
    return app.openapi_schema
