"""Bodies of POST /generate and of the other routes outside /v1. `None` means: not sent."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator

from .openai_models import (
    MAX_CHOICES,
    Bias,
    ChatMessage,
    Count,
    Modes,
    Penalty,
    PositiveShare,
    Priority,
    RepetitionPenalty,
    Share,
    Stops,
    StrictModel,
    Temperature,
    TopK,
    one_or_many,
)

Rid = Annotated[str, Field(min_length=1, max_length=200)]


def _id_list(value: object) -> object:
    """A list of ids, or a list with such a list (or null) per prompt of a batch."""
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return value
        rows = [item if item is not None else [] for item in value]
        if all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows):
            return rows
    raise ValueError("expected a list of token ids, or one such list per prompt")


IdLists = Annotated[
    list[int] | list[list[int]],
    PlainValidator(_id_list, json_schema_input_type=list[int] | list[list[int] | None]),
]


def _objects(value: object) -> object:
    """A single object as a list of one."""
    return [value] if isinstance(value, dict) else value


class NativeSampling(StrictModel):
    """`sampling_params` of /generate."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Annotated[list[str], BeforeValidator(one_or_many)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    json_schema: str | dict[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: Bias | None = None
    sampling_seed: int | None = None


class GenerateRequest(StrictModel):
    """Body of POST /generate: one prompt, or a batch with scalars or lists for its fields."""

    text: str | list[str] | None = None
    input_ids: IdLists | None = None
    sampling_params: Annotated[list[NativeSampling], BeforeValidator(_objects)] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: Count | list[Count] | None = None
    token_ids_logprob: IdLists | None = None
    return_text_in_logprobs: bool | None = None
    logprobs_mode: Modes | None = None
    stream: bool | None = None
    rid: Rid | list[Rid] | None = None
    priority: Priority | None = None


class TokenGenerateRequest(StrictModel):
    """Body of POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: dict[str, object] | None = None
    request_id: Rid | None = None
    model: str | None = None
    stream: bool | None = None


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class AbortRequest(StrictModel):
    """Body of POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


# Known to users of /generate and not built here: refused by name unless the value asks for nothing.
UNSUPPORTED_NATIVE: dict[str, tuple[object, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "modalities": ([],),
    "lora_path": (),
    "lora_id": (),
    "session_params": ({},),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}
UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {
    "structural_tag": (),
    "custom_params": ({},),
    "stream_interval": (),
    "beam_width": (1,),
    "beam_search_diversity_rate": (0, 0.0),
}
