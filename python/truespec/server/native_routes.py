"""POST /generate, the native dialect."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from truespec.params import Grammar
from truespec.tokenizer.prepare import FieldNames
from truespec.tokenizer.request_state import Piece

from .engine_client import Prepared
from .logprobs import JSONValue
from .names import name_of, new_id
from .native_models import (
    UNSUPPORTED_NATIVE,
    UNSUPPORTED_SAMPLING,
    GenerateRequest,
)
from .native_params import NativeItem, native_items
from .native_replies import NativeOptions, NativeReply
from .params import NATIVE_NAMES, native_params
from .responses import json_response, ready_service
from .service import Prompt, Service
from .streaming import Batcher, EventStream, finished
from .validation import Problems, StandIn, check_extra, parse, parse_object

router = APIRouter()
STAND_IN = StandIn(("text", "input_ids"), {"input_ids": [0]})
GRAMMAR_FIELDS = {"regex": "regex", "lark": "ebnf"}


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Generate in SGLang's native dialect."""
    started = time.monotonic()
    service = ready_service(request)
    body, problems = parse(GenerateRequest, parse_object(await request.body()), STAND_IN)
    check_extra(body, UNSUPPORTED_NATIVE, problems)
    items: list[NativeItem] = []
    is_batch = False
    with problems.guard():
        items, is_batch = native_items(body, service.limits.logprobs_mode)
    num_choices = (items[0].sampling.n or 1) if items else 1
    prepared = _prepare(service, body, items, num_choices, problems)
    generation = service.client.open(prepared)
    options = NativeOptions(
        table=service.table,
        many=is_batch or num_choices > 1,
        with_text=bool(body.return_text_in_logprobs),
        incremental=service.config.incremental_streaming_output,
        num_drafts=service.limits.num_drafts,
        started=started,
    )
    reply = NativeReply(options, generation.choices)
    if not body.stream:
        await finished(generation, request.receive)
        return json_response(reply.whole())
    batcher = Batcher(
        len(generation.choices),
        service.config.stream_interval,
        one_per_piece=items[0].logprobs is not None,
    )
    return EventStream(generation, NativeStream(reply, batcher))


class NativeStream:
    """Chunks of a /generate reply in the order they are sent."""

    def __init__(self, reply: NativeReply, batcher: Batcher) -> None:
        self._reply = reply
        self._batcher = batcher

    def opening(self) -> list[JSONValue]:
        """Nothing precedes the output."""
        return []

    def render(self, index: int, pieces: Sequence[Piece]) -> list[JSONValue]:
        """Chunks for one engine step of a choice."""
        return [self._reply.chunk(index, piece) for piece in self._batcher.take(index, pieces)]

    def closing(self) -> list[JSONValue]:
        """Nothing follows the output."""
        return []


def _prepare(
    service: Service,
    body: GenerateRequest,
    items: Sequence[NativeItem],
    num_choices: int,
    problems: Problems,
) -> list[Prepared]:
    """Check every prompt. Raises `BadRequest` with all that was found."""
    params = []
    for item in items:
        check_extra(item.sampling, UNSUPPORTED_SAMPLING, problems)
        _check_asked(item, service.limits.vocab_size, problems)
        with problems.guard():
            params.append(native_params(item.sampling, item.logprobs, service.defaults))
    if len(params) < len(items):
        problems.raise_any()
    prepared = service.prepare(
        [Prompt(_ids(service, item)) for item in items],
        params,
        num_choices,
        names=_names(params[0].grammar if params else None, body),
        problems=problems,
        request_names=[item.rid or new_id("gen") for item in items],
        priority=body.priority or 0,
    )
    for name in [name_of(one.submit.rid) for one in prepared if items[0].rid is not None]:
        if service.client.is_open(name):
            problems.add("rid", f"rid {name!r} is in use")
    problems.raise_any()
    return prepared


def _check_asked(item: NativeItem, vocab_size: int, problems: Problems) -> None:
    """Asked ids are checked even where no logprobs are returned."""
    bad = next((i for i in item.asked_ids if not 0 <= i < vocab_size), None)
    if bad is not None and item.logprobs is None:
        message = f"token_ids_logprob has {bad}, outside the vocabulary (0 to {vocab_size - 1})"
        problems.add("token_ids_logprob", message)


def _ids(service: Service, item: NativeItem) -> list[int]:
    if isinstance(item.prompt, str):
        return service.encode(item.prompt, add_special_tokens=True)
    return item.prompt


def _names(grammar: Grammar | None, body: GenerateRequest) -> FieldNames:
    field = GRAMMAR_FIELDS.get(grammar.kind, "json_schema") if grammar else "json_schema"
    prompt = "text" if body.text is not None else "input_ids"
    return NATIVE_NAMES._replace(grammar=field, prompt=prompt)
