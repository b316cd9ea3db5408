"""Tokenising, and control of the engine: cache and aborts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from truespec.tokenizer.errors import BadRequest, Problem
from truespec.tokenizer.prepare import FieldNames
from truespec.tokenizer.request_state import TextStream

from .names import is_part, name_of
from .native_models import AbortRequest, DetokenizeRequest, TokenizeRequest
from .openai_models import ChatRequest
from .openai_routes import CHAT_STAND_IN, chat_ids
from .responses import body_of, json_response, ready_service
from .service import Service
from .validation import parse

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Ids of a text or of a conversation."""
    service = ready_service(request)
    body = await body_of(request, TokenizeRequest)
    service.check_model(body.model)
    tokens = _tokens(service, body)
    return json_response(
        {"tokens": tokens, "count": len(tokens), "max_model_len": service.limits.context_length}
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Text of ids, special tokens included."""
    service = ready_service(request)
    body = await body_of(request, DetokenizeRequest)
    service.check_model(body.model)
    if body.tokens:
        service.check_ids(body.tokens, FieldNames(prompt="tokens"))
    stream = TextStream(service.table, skip_special_tokens=False)
    text = "".join([stream.push(token_id) for token_id in body.tokens]) + stream.flush()
    return json_response({"prompt": text})


@router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache, except what running requests use."""
    num_pages = await ready_service(request).client.flush_cache()
    return json_response({"success": True, "num_pages": num_pages})


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    """End a request by its id, with all its choices, or every request."""
    client = ready_service(request).client
    body = await body_of(request, AbortRequest)
    if not body.abort_all and not body.rid:
        raise BadRequest([Problem("rid", "rid or abort_all is needed")])
    asked = body.rid or ""
    rids = [rid for rid in client.rids if body.abort_all or is_part(name_of(rid), asked)]
    for rid in rids:
        client.abort(rid)
    return json_response({"success": True, "num_aborted": len(rids)})


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest([Problem("prompt", "exactly one of prompt and messages is needed")])
    if body.prompt is not None:
        return service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    chat = {
        "messages": [message.model_dump() for message in body.messages or []],
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    parsed = parse(ChatRequest, chat, CHAT_STAND_IN)
    with parsed.problems.guard():
        return chat_ids(service, parsed.body)
    raise BadRequest(parsed.problems.found)
