"""POST /v1/completions and /v1/chat/completions, and the list of models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from truespec.params import Grammar, SamplingParams
from truespec.tokenizer.chat_template import ChatTemplateError
from truespec.tokenizer.errors import BadRequest, Problem
from truespec.tokenizer.prepare import FieldNames, rest_of_context
from truespec.tokenizer.request_state import Piece

from .engine_client import Generation
from .errors import not_found
from .logprobs import JSONValue, LogprobView
from .names import new_id
from .openai_models import (
    UNSUPPORTED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
)
from .openai_replies import ChatReply, Chunk, CompletionReply, Echo, OpenAIReply, ReplyOptions
from .params import (
    CHAT_NAMES,
    COMPLETION_MAX_TOKENS,
    COMPLETION_NAMES,
    OpenAILogprobs,
    chat_logprobs,
    completion_logprobs,
    openai_grammar,
    openai_logprobs,
    openai_params,
)
from .responses import json_response, ready_service, service_of
from .service import Prompt, Service
from .streaming import Batcher, EventStream, finished
from .validation import (
    Parsed,
    Problems,
    StandIn,
    check_extra,
    parse,
    parse_object,
    warn_unknown,
)

router = APIRouter()
COMPLETION_STAND_IN = StandIn(("prompt",), {"prompt": [0]})
CHAT_STAND_IN = StandIn(("messages",), {"messages": [{"role": "user", "content": "?"}]})
LONG_TEXT_CHARS = 50_000
TEMPLATE_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Complete one or several prompts."""
    service = ready_service(request)
    parsed = parse(CompletionRequest, parse_object(await request.body()), COMPLETION_STAND_IN)
    return await complete(request, service, parsed, new_id("cmpl"), CompletionReply)


async def complete(
    request: Request,
    service: Service,
    parsed: Parsed[CompletionRequest],
    reply_id: str,
    reply_class: type[OpenAIReply],
) -> Response:
    """Run a completion and answer in the shape of `reply_class`. Raises `BadRequest`."""
    body, problems = parsed
    _check_common(service, body, problems)
    _check_completion(body, problems)
    shown = completion_logprobs(body)
    prompts = [await _prompt(service, body, given) for given in body.prompt]
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = [_params(service, body, shown, max_tokens, problems)] * len(prompts)
    names = _with_grammar_field(COMPLETION_NAMES, body)
    prepared = service.prepare(
        prompts,
        params,
        body.n or 1,
        names=names,
        problems=problems,
        request_names=_request_names(reply_id, len(prompts)),
        priority=_priority(body),
    )
    echoes = tuple(prompt.echo for prompt in prompts if prompt.echo is not None)
    options = _options(service, body, shown, reply_id, echoes)
    generation = service.client.open(prepared)
    return await _respond(request, body, generation, reply_class(options, generation.choices))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = ready_service(request)
    body, problems = parse(ChatRequest, parse_object(await request.body()), CHAT_STAND_IN)
    _check_common(service, body, problems)
    _check_chat(body, problems)
    shown = chat_logprobs(body)
    prompts: list[Prompt] = []
    with problems.guard():
        prompts = [Prompt(chat_ids(service, body))]
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_prompt = len(prompts[0].ids) if prompts else 0
    max_tokens = rest_of_context(num_prompt, service.limits) if asked is None else asked
    params = [_params(service, body, shown, max_tokens, problems)] * len(prompts)
    names = _with_grammar_field(CHAT_NAMES, body)
    reply_id = new_id("chatcmpl")
    prepared = service.prepare(
        prompts,
        params,
        body.n or 1,
        names=names,
        problems=problems,
        request_names=[reply_id],
        priority=_priority(body),
    )
    options = _options(service, body, shown, reply_id, _chat_echo(body))
    generation = service.client.open(prepared)
    return await _respond(request, body, generation, ChatReply(options, generation.choices))


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model_card(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The served model by name."""
    service = service_of(request)
    if name != service.model_name:
        raise not_found(f"the model {name!r} does not exist", "model")
    return json_response(_model_card(service))


def chat_ids(service: Service, body: ChatRequest) -> list[int]:
    """A conversation as ids, by the model's chat template. Raises `BadRequest`."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise BadRequest([Problem("continue_final_message", message)])
    try:
        text = service.backend.apply_chat_template(
            [template_message(message) for message in body.messages],
            add_generation_prompt=not continues and body.add_generation_prompt is not False,
            continue_final_message=continues,
            variables=body.chat_template_kwargs or {},
        )
    except ChatTemplateError as error:
        raise BadRequest([Problem("messages", f"messages: {error}")]) from error
    return service.encode(text, add_special_tokens=False)


def template_message(message: ChatMessage) -> dict[str, object]:
    """A message as a template sees it. Raises `BadRequest` for parts that are not text."""
    extra = message.model_extra or {}
    if extra.get("tool_calls") or message.role == "tool":
        raise BadRequest([Problem("messages", "tool messages are not supported by this server")])
    content = message.content
    if isinstance(content, list):
        others = sorted({part.type for part in content if part.type != "text"})
        if others:
            names = ", ".join(others)
            problem = f"messages: content of type {names} is not supported by this server"
            raise BadRequest([Problem("messages", problem)])
        content = "".join(part.text or "" for part in content)
    kept = {name: extra[name] for name in TEMPLATE_FIELDS if name in extra}
    return {"role": message.role, "content": content or "", **kept}


class OpenAIStream:
    """Chunks of a /v1 reply in the order they are sent."""

    def __init__(self, reply: OpenAIReply, batcher: Batcher) -> None:
        self._reply = reply
        self._batcher = batcher

    def opening(self) -> list[Chunk]:
        """Chunks before any output."""
        return self._reply.opening()

    def render(self, index: int, pieces: Sequence[Piece]) -> list[Chunk]:
        """Chunks for one engine step of a choice."""
        first = self._reply.begin(index)
        chunks = [self._reply.chunk(index, piece) for piece in self._batcher.take(index, pieces)]
        return chunks if first is None else [first, *chunks]

    def closing(self) -> list[Chunk]:
        """The usage chunk, where it was asked for."""
        return self._reply.closing()


async def _respond(
    request: Request, body: SamplingRequest, generation: Generation, reply: OpenAIReply
) -> Response:
    if not body.stream:
        await finished(generation, request.receive)
        return json_response(reply.whole())
    interval = service_of(request).config.stream_interval
    has_logprobs = reply.options.logprobs is not None
    batcher = Batcher(len(generation.choices), interval, one_per_piece=has_logprobs)
    return EventStream(generation, OpenAIStream(reply, batcher))


async def _prompt(service: Service, body: CompletionRequest, given: str | list[int]) -> Prompt:
    """A prompt as ids; a long text is encoded in a thread, so that streams go on meanwhile."""

    def make() -> Prompt:
        skips = body.skip_special_tokens is not False
        return service.prompt(given, echo=bool(body.echo), skip_special_tokens=skips)

    is_long = isinstance(given, str) and len(given) > LONG_TEXT_CHARS
    return await asyncio.to_thread(make) if is_long else make()


def _request_names(reply_id: str, num_prompts: int) -> list[str]:
    """So that a reply's id ends all of its prompts and choices."""
    if num_prompts == 1:
        return [reply_id]
    return [f"{reply_id}-{index}" for index in range(num_prompts)]


def _priority(body: SamplingRequest) -> int:
    """The engine's priority: users of these routes know lower numbers as the more urgent."""
    return -(body.priority or 0)


def _params(
    service: Service,
    body: SamplingRequest,
    shown: OpenAILogprobs,
    max_tokens: int,
    problems: Problems,
) -> SamplingParams:
    grammar: Grammar | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    with problems.guard():
        grammar = openai_grammar(body)
    with problems.guard():
        bad_words_ids = service.bad_words(body.bad_words or [])
    return openai_params(
        body,
        max_tokens=max_tokens,
        logprobs=openai_logprobs(body, shown, service.limits.logprobs_mode),
        grammar=grammar,
        bad_words_ids=bad_words_ids,
        defaults=service.defaults,
    )


def _with_grammar_field(names: FieldNames, body: SamplingRequest) -> FieldNames:
    uses_format = body.structured_outputs is None and body.response_format is not None
    return names._replace(grammar="response_format") if uses_format else names


def _check_common(service: Service, body: SamplingRequest, problems: Problems) -> None:
    service.check_model(body.model)
    check_extra(body, UNSUPPORTED, problems)
    warn_unknown(body, UNSUPPORTED)
    if body.stream_options is not None and not body.stream:
        problems.add("stream_options", "stream_options is only for streams (stream: true)")


def _check_completion(body: CompletionRequest, problems: Problems) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        problems.add("best_of", f"best_of is {body.best_of}, only the value of n is supported")
    if body.suffix is not None:
        problems.add("suffix", "suffix is not supported by this server")
    if body.token_details and not completion_logprobs(body).output:
        problems.add("token_details", "token_details needs logprobs")


def _check_chat(body: ChatRequest, problems: Problems) -> None:
    needy = {
        "top_logprobs": body.top_logprobs,
        "logprob_token_ids": body.logprob_token_ids,
        "token_details": body.token_details,
    }
    for name, value in needy.items():
        if value and not body.logprobs:
            problems.add(name, f"{name} needs logprobs: true")


def _options(
    service: Service,
    body: SamplingRequest,
    shown: OpenAILogprobs,
    reply_id: str,
    echoes: tuple[Echo, ...],
) -> ReplyOptions:
    view = LogprobView(
        table=service.table,
        top_k=shown.top_k,
        asked_ids=tuple(body.logprob_token_ids or ()),
        modes=tuple(body.logprobs_mode or [service.limits.logprobs_mode]),
        details=bool(body.token_details),
        as_ids=bool(body.return_tokens_as_token_ids),
    )
    stream_options = body.stream_options
    return ReplyOptions(
        id=reply_id,
        created=int(time.time()),
        model=service.model_name,
        num_choices=body.n or 1,
        logprobs=view if shown.output else None,
        table=service.table,
        prompt_top_k=shown.prompt_top_k,
        echoes=echoes,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        num_drafts=service.limits.num_drafts,
    )


def _chat_echo(body: ChatRequest) -> tuple[Echo, ...]:
    """The last message, where it is the assistant's and the reply shall repeat it."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ()
    return (Echo(str(template_message(last)["content"]), []),)


def _model_card(service: Service) -> dict[str, JSONValue]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "truespec",
        "root": service.engine_config.model_path,
        "max_model_len": service.limits.context_length if service.client.ready else None,
    }
