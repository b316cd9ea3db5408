"""The official Python SDK against a server that drafts: four shapes, one length, error classes."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from workers import MODEL_NAME

from api_client import ApiClient

PROMPT = [40, 41, 42, 43, 40, 41, 42, 43]
MESSAGES = [{"role": "user", "content": "Say something."}]
NUM_TOKENS = 32
SAMPLING = {"model": MODEL_NAME, "temperature": 2, "seed": 5, "max_tokens": NUM_TOKENS}
EXTRA = {"ignore_eos": True, "return_token_ids": True, "token_details": True}


@pytest.fixture(scope="module")
def sdk(dspark: ApiClient) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{dspark.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def strict(kind: type, value: object) -> None:
    """Validate against the SDK's types without conversions."""
    kind.model_validate(value.model_dump(), strict=True)


def check_drafted(details: list[dict]) -> None:
    """Some tokens were accepted drafts, some the target's own."""
    origins = {one["origin"] for one in details}
    assert origins == {"prefill", "draft", "target"}
    assert all((one["draft_logprob"] is not None) == (one["origin"] == "draft") for one in details)


def test_a_completion_has_one_length_and_its_text_is_that_of_its_tokens(sdk: openai.OpenAI) -> None:
    reply = sdk.completions.create(prompt=PROMPT, logprobs=2, extra_body=EXTRA, **SAMPLING)
    strict(Completion, reply)
    choice = reply.choices[0]
    logprobs = choice.logprobs
    lists = (
        choice.token_ids,
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset,
        logprobs.token_details,
    )
    assert {len(values) for values in lists} == {NUM_TOKENS} == {reply.usage.completion_tokens}
    check_drafted(logprobs.token_details)
    for value, top, name in zip(
        logprobs.token_logprobs, logprobs.top_logprobs, logprobs.tokens, strict=True
    ):
        assert top[name] == value <= max(top.values()) <= 0
    starts = [*logprobs.text_offset, len(choice.text)]
    for name, begin, end in zip(logprobs.tokens, starts, starts[1:], strict=False):
        assert name.startswith("bytes:") or end == begin or name in choice.text[begin:end]


def test_a_streamed_completion_joins_to_the_whole_one(sdk: openai.OpenAI) -> None:
    asked = {"prompt": PROMPT, "logprobs": 2, "extra_body": EXTRA, **SAMPLING}
    whole = sdk.completions.create(**asked)
    chunks = list(
        sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    for chunk in parts:
        assert len(chunk.choices) == 1
    assert last.choices == []
    assert last.usage.completion_tokens == NUM_TOKENS
    joined = [chunk.choices[0] for chunk in parts]
    choice = whole.choices[0]
    assert "".join(part.text for part in joined) == choice.text
    assert [i for part in joined for i in part.token_ids] == choice.token_ids
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "token_details"):
        values = [v for part in joined if part.logprobs for v in getattr(part.logprobs, field)]
        assert values == getattr(choice.logprobs, field)
    assert last.metrics == whole.metrics


def test_b38_a_chat_has_one_entry_per_token_and_exact_bytes(sdk: openai.OpenAI) -> None:
    asked = {"messages": MESSAGES, "logprobs": True, "extra_body": EXTRA, **SAMPLING}
    reply = sdk.chat.completions.create(top_logprobs=3, **asked)
    strict(ChatCompletion, reply)
    choice = reply.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == len(choice.token_ids) == reply.usage.completion_tokens == NUM_TOKENS
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data.decode(errors="replace") == choice.message.content
    check_drafted(choice.logprobs.token_details)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    bare = sdk.chat.completions.create(**asked)
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * NUM_TOKENS
    assert [e.logprob for e in bare.choices[0].logprobs.content] == [e.logprob for e in entries]
    without = sdk.chat.completions.create(messages=MESSAGES, **SAMPLING)
    assert without.choices[0].logprobs is None


def test_b38_a_streamed_chat_joins_to_the_whole_one(sdk: openai.OpenAI) -> None:
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "extra_body": EXTRA}
    whole = sdk.chat.completions.create(**asked, **SAMPLING).choices[0]
    chunks = list(sdk.chat.completions.create(**asked, **SAMPLING, stream=True))
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    parts = [chunk.choices[0] for chunk in chunks]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content for part in parts) == whole.message.content
    entries = [e for part in parts if part.logprobs for e in part.logprobs.content]
    assert [e.model_dump() for e in entries] == [e.model_dump() for e in whole.logprobs.content]
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == whole.finish_reason == "length"


def test_b38_logprobs_0_and_null_alternatives_of_completions(sdk: openai.OpenAI) -> None:
    zero = sdk.completions.create(prompt=PROMPT, logprobs=0, **SAMPLING).choices[0].logprobs
    assert all(isinstance(value, float) for value in zero.token_logprobs)
    assert all(len(top) == 1 for top in zero.top_logprobs)
    none = sdk.completions.create(prompt=PROMPT, **SAMPLING)
    assert none.choices[0].logprobs is None


def test_speculation_off_for_a_request_gives_the_same_reply(sdk: openai.OpenAI) -> None:
    on, off = (
        sdk.completions.create(
            prompt=PROMPT, logprobs=2, n=2, extra_body={"speculative": flag}, **SAMPLING
        )
        for flag in (True, False)
    )
    assert on.choices == off.choices


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
    ],
)
def test_mistakes_raise_the_sdks_error_classes(
    sdk: openai.OpenAI, fields: dict, error: type[openai.APIStatusError]
) -> None:
    for create, prompt in (
        (sdk.completions.create, {"prompt": PROMPT}),
        (sdk.chat.completions.create, {"messages": MESSAGES}),
    ):
        for stream in (False, True):
            with pytest.raises(error) as raised:
                create(**prompt, **(SAMPLING | fields), stream=stream)
            assert raised.value.param == next(iter(fields))
