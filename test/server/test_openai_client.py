"""The official Python SDK against the live server: shapes parse strictly, errors raise."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from live import Live, live_server
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from truespec.config import ServerConfig

MESSAGES = [{"role": "user", "content": "say:hé 😀|"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def strict(kind: type, value: object) -> None:
    """Validate against the SDK's types without conversions."""
    kind.model_validate(value.model_dump(), strict=True)


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="scripted", prompt="say:hi|", logprobs=2)
    strict(Completion, reply)
    assert reply.choices[0].text == "hi"
    assert reply.choices[0].logprobs.text_offset == [0, 1, 2]


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="scripted", prompt="say:hi|", logprobs=1, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="scripted", messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1
    )
    strict(ChatCompletion, reply)
    entries = reply.choices[0].logprobs.content
    assert reply.choices[0].message.content == "hé 😀"
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == "hé 😀"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == "hé 😀"
    assert chunks[-1].usage.completion_tokens > 0


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="scripted", prompt="x", max_tokens=-1)
    assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="scripted", prompt="fail:")


def test_an_error_in_a_stream_raises(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="scripted", prompt="fail:", stream=True)
    with pytest.raises(openai.APIError, match="a row was NaN"):
        list(stream)


def test_a_wrong_key_is_the_sdks_authentication_error() -> None:
    with live_server(ServerConfig(api_key="s3cret")) as server:
        for key, right in (("wrong", False), ("s3cret", True)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as sdk:
                if right:
                    assert sdk.models.list().data[0].id == "scripted"
                else:
                    with pytest.raises(openai.AuthenticationError):
                        sdk.models.list()
