"""Who leaves the queue first, and what a full queue answers to the official SDK."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from live import Live, live_server

from truespec.config import EngineConfig

HANG = {"prompt": "hang:", "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "asked", "sent"),
    [
        ("/v1/completions", {"prompt": "say:a|", "n": 2}, -3, 3),
        ("/v1/completions", {"prompt": "say:a|"}, 5, -5),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:a|"}]}, -3, 3),
        ("/inference/v1/generate", {"token_ids": [5]}, -3, 3),
        ("/generate", {"text": "say:a|"}, 3, 3),
        ("/generate", {"text": ["say:a|", "say:b|"]}, -5, -5),
    ],
)
def test_a_priority_reaches_the_engine_in_the_sense_of_its_dialect(
    live: Live, path: str, body: dict, asked: int, sent: int
) -> None:
    before = len(live.engine.submitted)
    fields = {"priority": asked}
    if path == "/inference/v1/generate":
        fields = {"sampling_params": {**fields, "max_tokens": 1}}
    live.ok(path, {**body, **fields})
    live.ok(path, {**body, "sampling_params": {"max_tokens": 1}} if "token_ids" in body else body)
    priorities = [submit.priority for submit in live.engine.submitted[before:]]
    half = len(priorities) // 2
    assert priorities == [sent] * half + [0] * half


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("value", [1.5, "1", True, 2**31, [1]])
def test_a_priority_that_is_no_small_integer_is_400(live: Live, path: str, value: object) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"text": "x"}
    reply = live.post(path, {**body, "priority": value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")


@contextmanager
def full_server() -> Iterator[Live]:
    """A server whose two places are taken by requests that wait."""
    config = EngineConfig(model_path="m", max_running_requests=1, max_queued_requests=1)
    with live_server(engine_config=config) as server:
        waiting = [
            threading.Thread(target=server.post, args=("/v1/completions", HANG)) for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        server.wait(lambda: server.engine.num_running == 2)
        yield server
        server.ok("/abort_request", {"abort_all": True})
        for thread in waiting:
            thread.join(5)


def test_a_full_queue_is_the_sdks_rate_limit_error_and_its_retry_succeeds() -> None:
    with full_server() as server:
        asked = {"model": "scripted", "prompt": "say:a|"}
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as sdk:
            with pytest.raises(openai.RateLimitError) as raised:
                sdk.completions.create(**asked)
            wait = int(raised.value.response.headers["retry-after"])
        timer = threading.Timer(0.2, server.ok, ("/abort_request", {"abort_all": True}))
        timer.start()
        begin = time.monotonic()
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=2) as sdk:
            assert sdk.completions.create(**asked).choices[0].text == "a"
        assert time.monotonic() - begin >= wait * 0.9
        timer.join()
