"""The packaged model and its drafter over HTTP: a few requests, speculation on and off."""

from __future__ import annotations

import pytest

from api_client import ApiClient

MESSAGES = [{"role": "user", "content": "Count: one, two, three, one, two, three, one, two,"}]
ASKED = {"messages": MESSAGES, "max_tokens": 24, "logprobs": True, "top_logprobs": 3, "seed": 4}


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_speculation_changes_no_token_and_no_logprob_of_the_packaged_model(
    default_model: ApiClient, temperature: float
) -> None:
    body = {**ASKED, "temperature": temperature, "logprobs_mode": ["raw", "processed"]}
    on = default_model.ok("/v1/chat/completions", body)
    off = default_model.ok("/v1/chat/completions", {**body, "speculative": False})
    assert on["choices"] == off["choices"]
    spec = on["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    *chunks, _ = default_model.events(
        "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    )
    parts = [chunk["choices"][0] for chunk in chunks]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert entries == on["choices"][0]["logprobs"]["content"]
