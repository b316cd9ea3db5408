"""Loading, full queues, clients that leave, aborts, keys, and an engine that goes away."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from live import Live, live_server

from truespec.config import EngineConfig, ServerConfig
from truespec.server.middleware import MAX_BODY_BYTES

HANG = {"prompt": "hang:", "max_tokens": 4}


def test_503_with_the_phase_while_the_engine_loads() -> None:
    with live_server(ready=False) as server:
        server.wait(lambda: server.service.client.phase == "loading weights")
        for path in ("/health", "/ready", "/health_generate", "/server_info"):
            reply = server.http.get(path)
            assert reply.status_code == 503
            assert "loading weights" in reply.json()["error"]["message"]
        reply = server.post("/v1/completions", {"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_429_with_retry_after_when_the_queue_is_full_and_400_for_what_never_fits() -> None:
    config = EngineConfig(model_path="m", max_running_requests=1, max_queued_requests=1)
    with live_server(engine_config=config) as server:
        threads = [
            threading.Thread(target=server.post, args=("/v1/completions", HANG)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        server.wait(lambda: server.engine.num_running == 2)
        reply = server.post("/v1/completions", {"prompt": "say:a|"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) >= 1
        assert server.post("/v1/completions", {"prompt": "a", "n": 3}).status_code == 400
        assert server.ok("/abort_request", {"abort_all": True})["num_aborted"] == 2
        for thread in threads:
            thread.join(5)
        assert server.ok("/v1/completions", {"prompt": "say:a|"})["choices"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(live: Live, stream: bool) -> None:
    before = len(live.engine.aborted)
    body = {**HANG, "stream": stream, "n": 2}
    with (
        httpx.Client(base_url=live.url) as client,
        pytest.raises(httpx.ReadTimeout),
    ):
        client.post("/v1/completions", json=body, timeout=0.3)
    live.wait(lambda: len(live.engine.aborted) == before + 2)
    live.wait(lambda: live.service.client.num_open == 0)


def test_an_aborted_request_gets_one_last_message(live: Live) -> None:
    replies: list[httpx.Response] = []
    body = {"text": "hang:", "rid": "to-abort"}
    thread = threading.Thread(target=lambda: replies.append(live.post("/generate", body)))
    thread.start()
    live.wait(lambda: live.service.client.is_open("to-abort"))
    assert live.ok("/abort_request", {"rid": "to-abort"})["num_aborted"] == 1
    thread.join(5)
    assert replies[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert live.ok("/abort_request", {"rid": "to-abort"})["num_aborted"] == 0
    assert live.post("/abort_request", {}).status_code == 400


def test_an_engine_that_dies_ends_open_requests_and_the_server() -> None:
    with live_server() as server:
        replies: list[httpx.Response] = []
        lines: list[str] = []

        def whole() -> None:
            replies.append(server.post("/v1/completions", HANG))

        def stream() -> None:
            with server.http.stream(
                "POST", "/v1/completions", json={**HANG, "stream": True}
            ) as reply:
                lines.extend(line for line in reply.iter_lines() if line)

        threads = [threading.Thread(target=whole), threading.Thread(target=stream)]
        for thread in threads:
            thread.start()
        server.wait(lambda: server.engine.num_running == 2)
        server.call(server.service.client.fail, "it ended with -9")
        for thread in threads:
            thread.join(5)
        assert replies[0].status_code == 503
        assert "it ended with -9" in replies[0].json()["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert server.failures == ["it ended with -9"]
        assert server.http.get("/health").status_code == 503
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503


@pytest.fixture(scope="module")
def locked():
    with live_server(ServerConfig(api_key="s3cret", allow_origin="https://a.example")) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/", "/docs", "/tokenizer_info"])
def test_the_key_protects_every_other_route(locked: Live, path: str) -> None:
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s"}):
        reply = locked.http.get(path, headers=header)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    right = {"authorization": "Bearer s3cret"}
    assert locked.http.get(path, headers=right).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_health_and_metrics_need_no_key(locked: Live, path: str) -> None:
    assert locked.http.get(path).status_code == 200


def test_cors_allows_the_configured_origin_only(locked: Live) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    reply = locked.http.options("/v1/completions", headers=asked)
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    other = locked.http.options("/v1/completions", headers={**asked, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_the_request_id_is_taken_or_made_and_returned(live: Live) -> None:
    assert (
        live.http.get("/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    )
    made = {live.http.get("/nope").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    reply = live.post("/v1/completions", {"prompt": "x", "n": 0}, **{"x-request-id": "bad"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (400, "bad")


def test_a_body_that_is_too_large_is_413(live: Live) -> None:
    def chunks():
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    announced = live.http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    unannounced = live.http.post("/v1/completions", content=chunks())
    for reply in (announced, unannounced):
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")


def test_model_defaults_count_only_when_asked() -> None:
    with live_server(ServerConfig(sampling_defaults="model")) as server:
        server.ok("/v1/completions", {"prompt": "say:a|"})
        server.ok("/generate", {"text": "say:a|", "sampling_params": {"temperature": 0.5}})
        first, second = (submit.params for submit in server.engine.submitted)
        assert (first.temperature, first.top_k) == (0.25, 7)
        assert (second.temperature, second.top_k) == (0.5, 7)


def test_the_id_of_a_reply_ends_all_its_prompts_and_choices(live: Live) -> None:
    body = {"prompt": ["slow:a", "slow:b"], "n": 2, "max_tokens": 4000, "stream": True}
    with live.http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as reply:
        lines = reply.iter_lines()
        reply_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert live.ok("/abort_request", {"rid": reply_id})["num_aborted"] == 4
        chunks = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
    finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert finishes.count("abort") == 4


def test_a_name_can_be_used_again_while_the_engine_still_sends_output_for_it(live: Live) -> None:
    """After a stop string the engine's next steps may be under way; they are another request's."""
    body = {"text": "say:abcdefghij|", "rid": "again", "sampling_params": {"stop": "c"}}
    for _ in range(30):
        assert live.ok("/generate", body)["text"] == "ab"
