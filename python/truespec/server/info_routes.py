"""What the server says about itself: health, model, load, metrics, tokenizer."""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import FileResponse, Response

from truespec.params import SamplingParams

from .errors import unavailable
from .logprobs import JSONValue
from .names import new_id
from .params import NATIVE_NAMES
from .responses import json_response, ready_service, service_of
from .service import Prompt, Service
from .streaming import finished
from .validation import Problems

router = APIRouter()
STATIC = Path(__file__).parent / "static"


@router.get("/health")
@router.get("/ready")
async def health(request: Request) -> Response:
    """200 when the engine can serve, else 503 with the phase. Cheap."""
    service_of(request).client.check_ready()
    return json_response({"status": "ok"})


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 after the engine has generated a token."""
    service = ready_service(request)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prepared = service.prepare(
        [Prompt([0])],
        [params],
        1,
        names=NATIVE_NAMES,
        problems=Problems(),
        request_names=[new_id("health")],
    )
    generation = service.client.open(prepared)
    await finished(generation, request.receive)
    if not generation.choices[0].records:
        raise unavailable("the engine gave no token", "no_token")
    return json_response({"status": "ok"})


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What is served."""
    service = ready_service(request)
    config = service.engine_config
    return json_response(
        {
            "model_path": config.model_path,
            "tokenizer_path": config.tokenizer_path or config.model_path,
            "served_model_name": service.model_name,
            "is_generation": True,
            "vocab_size": service.limits.vocab_size,
            "context_length": service.limits.context_length,
            "has_chat_template": service.backend.chat_template is not None,
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """The resolved options and the state of the engine."""
    service = ready_service(request)
    ready = service.client.ready
    assert ready is not None, "a ready client has the engine's report"
    shown = dataclasses.asdict(service.config) | {"api_key": None}
    counts = service.metrics.acceptance
    state = {
        "avg_spec_accept_length": counts.mean_length,
        "avg_spec_accept_rate": counts.rate,
        "num_open_requests": service.client.num_open,
    }
    return json_response(
        {
            **shown,
            **ready.options,
            "version": version("truespec"),
            "phases": ready.phases,
            "uptime": time.time() - service.started,
            "internal_states": [state],
        }
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Load of the engine, for routers."""
    service = ready_service(request)
    stats = await service.client.get_state()
    num_tokens = stats.num_pages_used * stats.page_size
    return json_response(
        {
            "loads": [
                {
                    "dp_rank": 0,
                    "num_reqs": stats.num_running + stats.num_waiting,
                    "num_running_reqs": stats.num_running,
                    "num_waiting_reqs": stats.num_waiting,
                    "num_tokens": num_tokens,
                    "max_total_num_tokens": stats.num_pages * stats.page_size,
                    "token_usage": stats.num_pages_used / stats.num_pages,
                    "num_cached_tokens": stats.num_pages_cached * stats.page_size,
                    "num_retractions": stats.num_retractions,
                }
            ]
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service = service_of(request)
    body = service.metrics.render(service.client.stats)
    return Response(body, media_type=CONTENT_TYPE_LATEST)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Special tokens and the chat template."""
    service = service_of(request)
    backend = service.backend
    special: dict[str, JSONValue] = dict(backend.special_tokens)
    return json_response(
        {
            "tokenizer_class": type(backend).__name__,
            "vocab_size": backend.vocab_size,
            "bos_token_id": backend.bos_token_id,
            "eos_token_id": backend.eos_token_id,
            "special_token_ids": sorted(backend.special_ids),
            "chat_template": backend.chat_template,
            **special,
            **_head_size(service),
        }
    )


@router.get("/", include_in_schema=False)
async def playground() -> Response:
    """A page to chat with the model and look at its logprobs."""
    return FileResponse(STATIC / "index.html", media_type="text/html")


def _head_size(service: Service) -> dict[str, JSONValue]:
    """Rows of the model's head and the context, once the engine has reported them."""
    if service.client.ready is None:
        return {}
    limits = service.limits
    return {"model_vocab_size": limits.vocab_size, "max_model_len": limits.context_length}
