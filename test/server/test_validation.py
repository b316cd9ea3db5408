"""Bad requests: 400 by name, all bad fields at once, and the server goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from live import Live
from scripted_engine import CONTEXT_LENGTH, VOCAB_SIZE

COMPLETION = {"prompt": "say:ok|", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "say:ok|"}], "max_tokens": 4}
GENERATE = {"text": "say:ok|", "sampling_params": {"max_new_tokens": 4}}
BAD_COUNTS = [-1, -2, VOCAB_SIZE + 1, 1_000_000, 2_000_000_000, 10**30, 1.5, "5", []]


def assert_refused(live: Live, path: str, body: dict, param: str) -> str:
    reply = live.post(path, body)
    assert reply.status_code == 400, (body, reply.text)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert param in error["message"]
    return error["message"]


@pytest.mark.parametrize("value", [*BAD_COUNTS, True])
def test_b32_bad_alternative_counts_are_400_by_name_and_the_next_request_succeeds(
    live: Live, value: object
) -> None:
    chat = {**CHAT, "logprobs": True, "top_logprobs": value}
    assert_refused(live, "/v1/chat/completions", chat, "top_logprobs")
    native = {**GENERATE, "return_logprob": True, "top_logprobs_num": value}
    if value != []:
        assert_refused(live, "/generate", native, "top_logprobs_num")
    if value is not True:
        assert_refused(live, "/v1/completions", {**COMPLETION, "logprobs": value}, "logprobs")
    scored = {**COMPLETION, "prompt_logprobs": value}
    assert_refused(live, "/v1/completions", scored, "prompt_logprobs")
    assert live.ok("/v1/completions", COMPLETION)["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("value", [None, 0, 20])
def test_b32_good_alternative_counts_are_accepted(live: Live, value: int | None) -> None:
    live.ok("/v1/completions", {**COMPLETION, "logprobs": value})
    live.ok("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": value})
    live.ok("/generate", {**GENERATE, "return_logprob": True, "top_logprobs_num": value})


def test_b32_chat_alternatives_without_logprobs_are_refused(live: Live) -> None:
    assert_refused(live, "/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", CONTEXT_LENGTH),
        ("max_tokens", 10**25),
        ("min_tokens", 5),
        ("n", 0),
        ("n", 1000),
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", True),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", 0.5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
        ("logit_bias", [1]),
        ("stop", ["a"] * 33),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [1.0]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("logprob_token_ids", [VOCAB_SIZE]),
        ("logprobs_mode", "cooked"),
        ("logprobs_mode", ["raw", "raw"]),
        ("stream_options", {"include_usage": True}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"json": {"type": "no such type"}}),
        ("structured_outputs", {"choice": []}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
    ],
)
def test_a_bad_field_is_refused_by_name_on_both_openai_routes(
    live: Live, field: str, value: object
) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        asks = {"logprobs": True} if "logprob" in field else {}
        assert_refused(live, path, {**body, **asks, field: value}, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ""),
        ("prompt", [1, "a"]),
        ("prompt", [1, True]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [[1], [-1]]),
        ("prompt", [5] * (CONTEXT_LENGTH + 1)),
        ("suffix", "x"),
        ("best_of", 2),
        ("use_beam_search", True),
        ("guided_json", {}),
        ("token_details", True),
    ],
)
def test_a_bad_completion_field_is_refused_by_name(live: Live, field: str, value: object) -> None:
    assert_refused(live, "/v1/completions", {**COMPLETION, field: value}, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "bad", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("audio", {"voice": "x"}),
        ("max_completion_tokens", -1),
    ],
)
def test_a_bad_chat_field_is_refused_by_name(live: Live, field: str, value: object) -> None:
    assert_refused(live, "/v1/chat/completions", {**CHAT, field: value}, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", 5),
        ("text", []),
        ("logprob_start_len", -2),
        ("logprob_start_len", 8),
        ("logprob_start_len", [0]),
        ("token_ids_logprob", [VOCAB_SIZE]),
        ("token_ids_logprob", [-1]),
        ("token_ids_logprob", [[1]]),
        ("image_data", "x"),
        ("lora_path", "x"),
        ("rid", ""),
        ("return_logprob", 1),
    ],
)
def test_a_bad_native_field_is_refused_by_name(live: Live, field: str, value: object) -> None:
    assert_refused(live, "/generate", {"return_logprob": True, **GENERATE, field: value}, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("max_new_tokens", CONTEXT_LENGTH),
        ("min_new_tokens", 999),
        ("temperature", -1),
        ("stop_regex", "("),
        ("stop_regex", "a*"),
        ("sampling_seed", -1),
        ("json_schema", '{"type": "x"}'),
        ("regex", "("),
        ("ebnf", "root ::= ("),
        ("structural_tag", "x"),
    ],
)
def test_a_bad_native_sampling_parameter_is_refused_by_name(
    live: Live, field: str, value: object
) -> None:
    assert_refused(live, "/generate", {"text": "x", "sampling_params": {field: value}}, field)


def test_asked_ids_are_checked_even_when_no_logprobs_are_returned(live: Live) -> None:
    body = {**GENERATE, "return_logprob": False, "token_ids_logprob": [VOCAB_SIZE]}
    assert_refused(live, "/generate", body, "token_ids_logprob")


def test_all_bad_fields_are_listed_and_param_is_the_first(live: Live) -> None:
    body = {**CHAT, "temperature": -1, "tools": [{}], "top_logprobs": 99, "logprobs": True}
    message = assert_refused(live, "/v1/chat/completions", {**body, "seed": -3}, "temperature")
    assert all(name in message for name in ("temperature", "tools", "top_logprobs", "seed"))
    native = {"text": 5, "sampling_params": {"top_k": "x", "temperature": -1}, "lora_path": "x"}
    message = assert_refused(live, "/generate", native, "text")
    assert all(name in message for name in ("text", "top_k", "temperature", "lora_path"))


def test_x01_bad_requests_do_not_disturb_20_concurrent_good_ones(live: Live) -> None:
    bad = {**CHAT, "prompt_logprobs": 99, "tools": [{}], "n": 0}

    def send(index: int) -> str:
        if index % 2:
            return assert_refused(live, "/v1/chat/completions", bad, "n")
        reply = live.ok("/v1/completions", {"prompt": f"say:{index}|", "max_tokens": 9})
        return reply["choices"][0]["text"]

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(send, range(40)))
    assert answers[::2] == [str(index) for index in range(0, 40, 2)]
    assert all("prompt_logprobs" in answer and "tools" in answer for answer in answers[1::2])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'{"prompt": NaN}', b'{"temperature": Infinity}', b'{"top_p": 1e999}'],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize"])
def test_bodies_that_are_not_strict_json_objects_are_400(
    live: Live, path: str, body: bytes
) -> None:
    reply = live.http.post(path, content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "body"


def test_harmless_values_of_unsupported_fields_are_accepted(live: Live) -> None:
    body = {**CHAT, "tools": [], "tool_choice": "none", "best_of": 1, "modalities": ["text"]}
    assert live.ok("/v1/chat/completions", body)["choices"]


def test_unknown_fields_are_ignored_and_said_once(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        live.ok("/v1/completions", {**COMPLETION, "never_heard_of": 1})
        live.ok("/generate", {**GENERATE, "injected_by_a_gateway": 1})
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "never_heard_of" in line]) == 1
    assert not [line for line in said if "injected_by_a_gateway" in line]


def test_null_fields_count_as_not_sent(live: Live) -> None:
    names = ("n", "temperature", "stop", "logit_bias", "seed", "stream", "logprobs", "echo")
    assert live.ok("/v1/completions", {**COMPLETION, **dict.fromkeys(names)})["choices"]


def test_an_unknown_model_is_404_and_names_the_served_one(live: Live) -> None:
    reply = live.post("/v1/completions", {**COMPLETION, "model": "gpt-9"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert "scripted" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/nope"), ("GET", "/generate")])
def test_errors_of_the_router_have_the_same_body(live: Live, method: str, path: str) -> None:
    reply = live.http.request(method, path)
    assert reply.status_code in (404, 405)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
