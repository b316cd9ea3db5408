"""Bodies of the /v1 routes. `None` means that the field was not sent; defaults come later."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from truespec.params import LogprobMode

Prompts = list[str | list[int]]
MAX_CHOICES = 128


def _prompts(value: object) -> Prompts:
    """All four shapes of a prompt as a list of texts or id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, list) and all(type(i) is int for i in item) for item in value):
            return value
    raise ValueError("expected a text, a list of texts, a list of token ids or a list of id lists")


def one_or_many(value: object) -> object:
    """A single text as a list of one."""
    return [value] if isinstance(value, str) else value


def _count_or_bool(value: object) -> object:
    """`logprobs: true` counts as 1 and `false` as not asked (both occur in clients)."""
    if value is True:
        return 1
    return None if value is False else value


def _temperature(value: float) -> float:
    if value < 0 or 0 < value < 1e-6:
        raise ValueError("expected 0 (greedy) or at least 1e-6")
    return value


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("expected an object from token ids to numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19):
            raise ValueError(f"key {str(key)[:40]!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


Count = Annotated[int, Field(ge=0)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Temperature = Annotated[float, AfterValidator(_temperature)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100)]
TopK = Annotated[int, Field(ge=-1)]
Stops = Annotated[list[str], BeforeValidator(one_or_many)]
Modes = Annotated[list[LogprobMode], BeforeValidator(one_or_many)]
Bias = Annotated[dict[int, float], PlainValidator(_bias, json_schema_input_type=dict[str, float])]
CountOrBool = Annotated[Count | None, BeforeValidator(_count_or_bool)]
PromptField = Annotated[
    Prompts,
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class StrictModel(BaseModel):
    """A body whose numbers and booleans are not converted; fields it does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(StrictModel):
    """What a stream carries beside its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(StrictModel):
    """A constraint on the output; exactly one field is set."""

    json_: str | dict[str, object] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchema(StrictModel):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's form of a constraint."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingRequest(StrictModel):
    """Fields that both /v1 routes share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    seed: int | None = None
    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Bias | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    speculative: bool | None = None
    priority: Priority | None = None
    echo: bool | None = None
    prompt_logprobs: Count | None = None
    logprob_token_ids: list[int] | None = None
    logprobs_mode: Modes | None = None
    token_details: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(SamplingRequest):
    """Body of POST /v1/completions."""

    prompt: PromptField
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None
    logprobs: CountOrBool = None


class TextPart(StrictModel):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(StrictModel):
    """One message; fields a template may use are passed through."""

    role: str
    content: str | list[TextPart] | None = None


class ChatRequest(SamplingRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


# Known elsewhere and not built here: refused by name unless the value asks for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "best_of": (1,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "lora_path": (),
    "stop_regex": ([],),
}
