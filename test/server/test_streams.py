"""Streams: chunks joined give the whole reply, entry by entry."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from byte_backend import byte_backend
from live import Live, live_server

from truespec.config import ServerConfig
from truespec.core import Finish, TokenRecord
from truespec.message import Output, Submit
from truespec.params import SamplingParams
from truespec.server.engine_client import Generation
from truespec.server.openai_replies import CompletionReply, ReplyOptions
from truespec.server.openai_routes import OpenAIStream
from truespec.server.streaming import Batcher, EventStream
from truespec.tokenizer.request_state import RequestState
from truespec.tokenizer.token_table import TokenTable

TEXT = "say:ha ha, ünï€😀 done|"


@pytest.fixture(scope="module")
def slow_stream():
    """Three engine steps per chunk."""
    with live_server(ServerConfig(stream_interval=3)) as server:
        yield server


def joined_completion(events: list[dict]) -> dict:
    """Text, entries and finish of each choice of a stream."""
    choices: dict[int, dict] = {}
    for event in events:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": {}, "ids": []})
            whole["text"] += choice["text"]
            whole["ids"] += choice.get("token_ids", [])
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
            whole["finish_reason"] = choice["finish_reason"] or whole.get("finish_reason")
    return choices


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stop", [None, ["ï€😀 d"], ["not there", "ha h"]])
def test_b13_joined_completion_stream_is_the_whole_reply(
    live: Live, slow_stream: Live, echo: bool, n: int, stop: list[str] | None
) -> None:
    body = {"prompt": [TEXT, "say:x|"], "max_tokens": 64, "seed": 5, "logprobs": 2, "n": n}
    body |= {"echo": echo, "stop": stop, "return_token_ids": True, "token_details": True}
    whole = live.ok("/v1/completions", body)
    for server in (live, slow_stream):
        events = server.events("/v1/completions", body)
        joined = joined_completion(events)
        for choice in whole["choices"]:
            stream = joined[choice["index"]]
            assert stream["text"] == choice["text"]
            assert stream["logprobs"] == choice["logprobs"]
            assert stream["ids"] == choice["token_ids"]
            assert stream["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("speculative", [True, False])
def test_b13_joined_chat_stream_is_the_whole_reply(
    live: Live, slow_stream: Live, speculative: bool
) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "logprobs": True, "top_logprobs": 2}
    body |= {"speculative": speculative, "seed": 3}
    whole = live.ok("/v1/chat/completions", body)["choices"][0]
    for server in (live, slow_stream):
        events = server.events("/v1/chat/completions", body)
        choices = [event["choices"][0] for event in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in choices) == whole["message"]["content"]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == whole["logprobs"]["content"]
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"


def test_one_chunk_per_token_with_logprobs_and_per_step_without(live: Live) -> None:
    body = {"prompt": "say:abcdefghijkl|", "max_tokens": 64}
    with_logprobs = live.events("/v1/completions", {**body, "logprobs": 0})
    assert [len(e["choices"][0]["logprobs"]["tokens"]) for e in with_logprobs] == [1] * 13
    without = live.events("/v1/completions", body)
    assert 1 < len(without) < 13
    assert "".join(e["choices"][0]["text"] for e in without) == "abcdefghijkl"


def test_stream_interval_batches_engine_steps(live: Live, slow_stream: Live) -> None:
    body = {"prompt": "say:abcdefghijkl|", "max_tokens": 64, "speculative": False}
    assert len(live.events("/v1/completions", body)) == 13
    assert len(slow_stream.events("/v1/completions", body)) == 5


def test_the_usage_chunk_has_no_choices_and_carries_the_metrics(live: Live) -> None:
    body = {"prompt": "say:abcdef|", "max_tokens": 64, "stream_options": {"include_usage": True}}
    events = live.events("/v1/completions", body)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 7
    assert events[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert all(event["usage"] is None for event in events[:-1])
    plain = live.events("/v1/completions", {**body, "stream_options": None})
    assert all("usage" not in event for event in plain)


def test_continuous_usage_counts_up(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "say:abcd|", "logprobs": 0, "max_tokens": 64, "stream_options": options}
    events = live.events("/v1/completions", body)
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 4, 5, 5]


def test_a_failure_in_a_stream_is_an_error_line_and_then_done(live: Live) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "fail:", "max_tokens": 9}),
        ("/generate", {"text": "fail:", "sampling_params": {"max_new_tokens": 9}}),
    ):
        events = live.events(path, body)
        assert events[-1]["error"]["type"] == "server_error"
        assert "a row was NaN" in events[-1]["error"]["message"]
        assert all("error" not in event for event in events[:-1])


def test_a_bad_request_for_a_stream_is_a_plain_400(live: Live) -> None:
    reply = live.post("/v1/completions", {"prompt": "x", "stream": True, "n": 0})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


def native_output(event: dict) -> tuple[str, list[int], list]:
    return event["text"], event["output_ids"], event["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("stop", [None, ["ï€😀 d"]])
def test_the_native_stream_is_cumulative_and_ends_with_the_whole_reply(
    live: Live, slow_stream: Live, stop: list[str] | None
) -> None:
    sampling = {"max_new_tokens": 64, "sampling_seed": 3, "stop": stop}
    body = {"text": TEXT, "sampling_params": sampling, "rid": "native-stream"}
    body |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    body |= {"return_text_in_logprobs": True}
    whole = live.ok("/generate", body)
    for server in (live, slow_stream):
        events = server.events("/generate", body)
        last = events[-1]
        for reply in (whole, last):
            reply["meta_info"].pop("e2e_latency", None)
        assert last == whole
        texts = [event["text"] for event in events]
        assert all(b.startswith(a) for a, b in pairwise(texts))


def test_the_incremental_native_stream_joins_to_the_whole_reply(live: Live) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 64, "sampling_seed": 3}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    whole = live.ok("/generate", body)
    with live_server(ServerConfig(incremental_streaming_output=True)) as server:
        events = server.events("/generate", body)
    joined = [sum((native_output(e)[i] for e in events), start) for i, start in ((1, []), (2, []))]
    assert "".join(event["text"] for event in events) == whole["text"]
    assert joined == [whole["output_ids"], whole["meta_info"]["output_token_logprobs"]]
    inputs = [e["meta_info"].get("input_token_logprobs") for e in events]
    assert inputs == [whole["meta_info"]["input_token_logprobs"]] + [None] * (len(events) - 1)


def test_chunks_of_a_native_batch_say_whose_they_are(live: Live) -> None:
    body = {"text": ["say:ab|", "say:cdef|"], "sampling_params": {"max_new_tokens": 64}}
    last = {event["index"]: event["text"] for event in live.events("/generate", body)}
    assert last == {0: "ab", 1: "cdef"}


def test_a_failed_choice_ends_the_stream_and_the_other_choices(live: Live) -> None:
    body = {"prompt": ["hang:", "fail:"], "max_tokens": 9}
    events = live.events("/v1/completions", body)
    assert [event for event in events if "error" in event] == events[-1:]
    live.wait(lambda: live.engine.num_running == 0)
    assert live.service.client.num_open == 0


def test_output_that_came_before_the_stream_began_is_not_lost() -> None:
    table = TokenTable(byte_backend())
    state = RequestState(Submit("r", [1], SamplingParams()), table)
    generation = Generation(ClosedClient(), [state])
    generation.put(state, state.feed(Output("r", [TokenRecord(70, "prefill")], Finish("length"))))
    options = ReplyOptions("id", 0, "m", 1, None, table)
    reply = CompletionReply(options, [state])
    stream = OpenAIStream(reply, Batcher(1, 1, one_per_piece=False))
    sent: list[bytes] = []

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> dict:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    asyncio.run(asyncio.wait_for(EventStream(generation, stream)({}, receive, send), 5))
    text = b"".join(sent).decode()
    assert table.text_of(70) in text
    assert text.endswith("data: [DONE]\n\n")


class ClosedClient:
    """What a generation needs of its client when all is over."""

    def close(self, generation: Generation) -> None:
        assert generation.is_done
