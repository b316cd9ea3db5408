"""Routes about the server, tokenising, metrics."""

from __future__ import annotations

import re

import pytest
from live import Live, live_server
from scripted_engine import CONTEXT_LENGTH, VOCAB_SIZE

from truespec.config import ServerConfig


@pytest.mark.parametrize("path", ["/health", "/ready", "/health_generate"])
def test_a_ready_server_is_healthy(live: Live, path: str) -> None:
    assert live.http.get(path).status_code == 200


def test_health_generate_makes_a_token(live: Live) -> None:
    before = len(live.engine.submitted)
    live.http.get("/health_generate")
    assert live.engine.submitted[before].params.max_tokens == 1


def test_models_are_listed_and_found_by_name(live: Live) -> None:
    card = live.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("scripted", CONTEXT_LENGTH)
    assert live.http.get("/v1/models/scripted").json() == card
    assert live.http.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(live: Live, path: str) -> None:
    info = live.http.get(path).json()
    assert (info["model_path"], info["vocab_size"]) == ("models/scripted", VOCAB_SIZE)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_the_resolved_options_and_the_accept_length(live: Live, path: str) -> None:
    live.ok("/v1/completions", {"prompt": "say:abcdefgh|"})
    info = live.http.get(path).json()
    assert info["context_length"] == CONTEXT_LENGTH
    assert info["speculative"]["num_drafts"] == 3
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1
    assert info["api_key"] is None


def test_loads_come_from_the_engine(live: Live) -> None:
    load = live.http.get("/v1/loads").json()["loads"][0]
    assert (load["num_tokens"], load["max_total_num_tokens"]) == (25 * 16, 100 * 16)


def test_there_is_no_version_route(live: Live) -> None:
    assert live.http.get("/version").status_code == 404


def test_tokenize_and_detokenize_are_inverse(live: Live) -> None:
    reply = live.ok("/tokenize", {"prompt": "the ha é"})
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == CONTEXT_LENGTH
    assert live.ok("/detokenize", {"tokens": reply["tokens"]}) == {"prompt": "the ha é"}


def test_a_conversation_is_tokenised_by_the_template(live: Live) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = live.ok("/tokenize", {"messages": messages})["tokens"]
    text = live.ok("/detokenize", {"tokens": tokens})["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    short = live.ok("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert tokens[: short["count"]] == short["tokens"]
    live.ok("/v1/chat/completions", {"messages": messages})
    assert live.engine.submitted[-1].prompt_ids == tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": [{"role": "bad", "content": ""}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
def test_bad_tokenize_requests_are_400(live: Live, path: str, body: dict) -> None:
    assert live.post(path, body).status_code == 400


def test_the_prefix_cache_can_be_flushed(live: Live) -> None:
    assert live.ok("/flush_cache", {}) == {"success": True, "num_pages": 7}


def test_tokenizer_info(live: Live) -> None:
    info = live.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["eos_token_id"]) == ("<|im_end|>", 2)
    assert "message['content']" in info["chat_template"]


def test_the_schema_of_the_docs_describes_the_bodies(live: Live) -> None:
    schema = live.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    assert "temperature" in schema["components"]["schemas"][name]["properties"]
    text = live.http.get("/openapi.json").text
    for reference in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert reference in schema["components"]["schemas"]


def test_the_playground_is_one_page_without_external_assets(live: Live) -> None:
    page = live.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", page.text)


def samples(text: str) -> dict[str, float]:
    """Prometheus' text format as {name with labels: value}."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_count_what_replies_report() -> None:
    with live_server(ServerConfig(metrics_compat="vllm,sglang")) as server:
        replies = [
            server.ok("/v1/completions", {"prompt": p, "max_tokens": 64})
            for p in ("say:abcdefgh|", "say:one two|")
        ]
        stopped = {"prompt": "say:one two three|", "stop": "wo", "max_tokens": 64}
        replies.append(server.ok("/v1/completions", stopped))
        server.post("/v1/completions", {"prompt": "fail:"})
        found = samples(server.http.get("/metrics").text)
    spec = [reply["metrics"]["speculative_decoding"] for reply in replies]
    label = '{model_name="scripted"}'
    engine = '{engine="0",model_name="scripted"}'
    failed = 2  # the request that failed had two tokens
    for prefix in ("truespec", "vllm", "sglang"):
        tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
        assert found[f"{prefix}:generation_tokens_total{label}"] == tokens + failed
        assert found[f"{prefix}:e2e_request_latency_seconds_count{label}"] == 4
        assert found[f"{prefix}:time_to_first_token_seconds_count{label}"] == 4
    accepted = sum(s["num_accepted_draft_tokens"] for s in spec)
    assert accepted > 0
    extra = found[f"truespec:spec_decode_num_accepted_tokens_total{label}"] - accepted
    assert extra in (0, 1)  # the failed request's second token
    assert found[f"vllm:spec_decode_num_accepted_tokens_total{engine}"] == accepted + extra
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    per_position = [value for key, value in found.items() if key.startswith(name)]
    assert sum(per_position) == accepted + extra
    assert found[f"sglang:spec_accept_length{label}"] > 1
    assert found['truespec:requests_finished_total{model_name="scripted",reason="stop"}'] == 3
    assert found['truespec:requests_finished_total{model_name="scripted",reason="error"}'] == 1
    assert found[f"truespec:kv_cache_usage{label}"] == 0.25
    assert found[f"vllm:prefix_cache_hits_total{label}"] == 50
