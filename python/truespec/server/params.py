"""From request models of both dialects to `SamplingParams`. Knows the dialects' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import orjson

from truespec.params import Grammar, LogprobMode, LogprobParams, SamplingParams
from truespec.tokenizer.errors import BadRequest, Problem
from truespec.tokenizer.prepare import FieldNames

from .native_models import NativeSampling
from .openai_models import ChatRequest, CompletionRequest, SamplingRequest, StructuredOutputs

COMPLETION_MAX_TOKENS = 16
NATIVE_MAX_TOKENS = 128
COMPLETION_NAMES = FieldNames()
CHAT_NAMES = FieldNames(prompt="messages", top_logprobs="top_logprobs")
NATIVE_NAMES = FieldNames(
    prompt="input_ids",
    max_tokens="max_new_tokens",
    min_tokens="min_new_tokens",
    seed="sampling_seed",
    top_logprobs="top_logprobs_num",
    prompt_logprobs="top_logprobs_num",
    asked_ids="token_ids_logprob",
    grammar="json_schema",
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_model(cls, generation: Mapping[str, object]) -> SamplingDefaults:
        """Defaults a checkpoint's generation_config names; the others stay the API's."""

        def number(name: str, default: float) -> float:
            value = generation.get(name)
            return float(value) if isinstance(value, int | float) else default

        return cls(
            number("temperature", 1.0),
            number("top_p", 1.0),
            int(number("top_k", 0)),
            number("min_p", 0.0),
            number("repetition_penalty", 1.0),
        )


@dataclass(frozen=True, slots=True)
class OpenAILogprobs:
    """Which logprobs a /v1 reply shows.

    Attributes:
        output: entries for output tokens (and echoed prompt tokens).
        top_k: alternatives per entry.
        prompt_top_k: `prompt_logprobs`, `None` when not asked.
        echoed: entries for the echoed prompt too.
    """

    output: bool
    top_k: int
    prompt_top_k: int | None
    echoed: bool = False


def completion_logprobs(request: CompletionRequest) -> OpenAILogprobs:
    """What /v1/completions shows."""
    output = request.logprobs is not None or bool(request.logprob_token_ids)
    echoed = output and bool(request.echo)
    return OpenAILogprobs(output, request.logprobs or 0, request.prompt_logprobs, echoed)


def chat_logprobs(request: ChatRequest) -> OpenAILogprobs:
    """What /v1/chat/completions shows."""
    return OpenAILogprobs(
        bool(request.logprobs), request.top_logprobs or 0, request.prompt_logprobs
    )


def openai_params(
    request: SamplingRequest,
    *,
    max_tokens: int,
    logprobs: LogprobParams | None,
    grammar: Grammar | None,
    bad_words_ids: tuple[tuple[int, ...], ...],
    defaults: SamplingDefaults,
) -> SamplingParams:
    """Parameters of a /v1 request."""
    seed = None if request.seed == -1 else request.seed  # NOTE: clients send -1 for a random one
    return SamplingParams(
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        min_p=_or(request.min_p, defaults.min_p),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=tuple((request.logit_bias or {}).items()),
        allowed_token_ids=_tuple_or_none(request.allowed_token_ids),
        bad_words_ids=bad_words_ids,
        grammar=grammar,
        logprobs=logprobs,
        speculative=_or(request.speculative, True),
        skip_special_tokens=_or(request.skip_special_tokens, True),
        spaces_between_special_tokens=_or(request.spaces_between_special_tokens, True),
        include_stop=bool(request.include_stop_str_in_output),
    )


def openai_logprobs(
    request: SamplingRequest, shown: OpenAILogprobs, default_mode: LogprobMode
) -> LogprobParams | None:
    """What the engine has to compute for what a /v1 reply shows."""
    if not shown.output and shown.prompt_top_k is None:
        return None
    prompt_widths = [shown.prompt_top_k or 0, shown.top_k if shown.echoed else 0]
    return LogprobParams(
        top_k=shown.top_k,
        prompt_top_k=max(prompt_widths),
        start=0 if shown.echoed or shown.prompt_top_k is not None else -1,
        token_ids=tuple(request.logprob_token_ids or ()),
        modes=tuple(_or(request.logprobs_mode, [default_mode])),
        details=bool(request.token_details) or shown.prompt_top_k is not None,
    )


def openai_grammar(request: SamplingRequest) -> Grammar | None:
    """The constraint of a /v1 request. Raises `BadRequest` when there are several or half ones."""
    outputs, form = request.structured_outputs, request.response_format
    found = _structured(outputs) if outputs is not None else None
    if form is None or form.type == "text":
        return found
    if found is not None:
        message = "response_format and structured_outputs cannot be combined"
        raise BadRequest([Problem("response_format", message)])
    if form.type == "json_object":
        return Grammar("json_object")
    if form.json_schema is None or form.json_schema.schema_ is None:
        message = "response_format of type json_schema needs json_schema.schema"
        raise BadRequest([Problem("response_format", message)])
    return Grammar("json_schema", _json_text(form.json_schema.schema_))


def native_params(
    sampling: NativeSampling, logprobs: LogprobParams | None, defaults: SamplingDefaults
) -> SamplingParams:
    """Parameters of one prompt of /generate. Raises `BadRequest` for more than one grammar."""
    return SamplingParams(
        temperature=_or(sampling.temperature, defaults.temperature),
        top_p=_or(sampling.top_p, defaults.top_p),
        top_k=max(0, _or(sampling.top_k, defaults.top_k)),
        min_p=_or(sampling.min_p, defaults.min_p),
        frequency_penalty=_or(sampling.frequency_penalty, 0.0),
        presence_penalty=_or(sampling.presence_penalty, 0.0),
        repetition_penalty=_or(sampling.repetition_penalty, defaults.repetition_penalty),
        seed=sampling.sampling_seed,
        max_tokens=_or(sampling.max_new_tokens, NATIVE_MAX_TOKENS),
        min_tokens=sampling.min_new_tokens or 0,
        stop=tuple(sampling.stop or ()),
        stop_regex=tuple(sampling.stop_regex or ()),
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        ignore_eos=bool(sampling.ignore_eos),
        logit_bias=tuple((sampling.logit_bias or {}).items()),
        grammar=_native_grammar(sampling),
        logprobs=logprobs,
        skip_special_tokens=_or(sampling.skip_special_tokens, True),
        spaces_between_special_tokens=_or(sampling.spaces_between_special_tokens, True),
        include_stop=bool(sampling.no_stop_trim),
    )


def _structured(outputs: StructuredOutputs) -> Grammar:
    found: list[Grammar] = []
    if outputs.json_ is not None:
        found.append(Grammar("json_schema", _json_text(outputs.json_)))
    if outputs.regex is not None:
        found.append(Grammar("regex", outputs.regex))
    if outputs.choice is not None:
        found.append(Grammar("choice", _json_text(outputs.choice)))
    if outputs.grammar is not None:
        found.append(Grammar("lark", outputs.grammar))
    unknown = sorted(name for name, v in (outputs.model_extra or {}).items() if v is not None)
    if len(found) != 1 or unknown:
        message = "structured_outputs needs exactly one of json, regex, choice and grammar"
        shown = f"{message}; {', '.join(unknown)} is not supported" if unknown else message
        raise BadRequest([Problem("structured_outputs", shown)])
    if outputs.choice == []:
        raise BadRequest([Problem("structured_outputs", "structured_outputs.choice is empty")])
    return found[0]


def _native_grammar(sampling: NativeSampling) -> Grammar | None:
    found: list[Grammar] = []
    if sampling.json_schema is not None:
        found.append(Grammar("json_schema", _json_text(sampling.json_schema)))
    if sampling.regex is not None:
        found.append(Grammar("regex", sampling.regex))
    if sampling.ebnf is not None:
        found.append(Grammar("lark", sampling.ebnf))
    if len(found) > 1:
        message = "only one of json_schema, regex and ebnf can be given"
        raise BadRequest([Problem("json_schema", message)])
    return found[0] if found else None


def _json_text(value: str | dict[str, object] | list[str]) -> str:
    """JSON text of a value; a text is JSON already. Keeps the order of keys."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _tuple_or_none(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
