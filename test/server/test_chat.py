"""POST /v1/chat/completions: shapes, bytes, templates, limits."""

from __future__ import annotations

import pytest
from live import Live
from scripted_engine import CONTEXT_LENGTH


def chat(live: Live, text: str, **fields: object) -> dict:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return live.ok("/v1/chat/completions", body)


def test_bytes_of_the_entries_are_the_utf8_of_the_text(live: Live) -> None:
    choice = chat(live, "say:naïve 😀!|", logprobs=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "naïve 😀!"
    visible = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert visible.decode() == "naïve 😀!"
    special = content[-1]
    assert bytes(special["bytes"]).decode() == special["token"] == "<|im_end|>"


def test_b38_logprobs_alone_give_empty_alternatives_and_numbers(live: Live) -> None:
    content = chat(live, "say:abc|", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4
    assert all(isinstance(entry["logprob"], float) for entry in content)


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
def test_b38_logprobs_are_null_when_not_asked(live: Live, fields: dict) -> None:
    assert chat(live, "say:abc|", **fields)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("top_k", [0, 2, 4, 20])
def test_b29_exactly_the_asked_number_of_alternatives(live: Live, top_k: int) -> None:
    reply = chat(live, "say:abc|", logprobs=True, top_logprobs=top_k)
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == top_k
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_without_a_limit_the_rest_of_the_context_is_the_limit(live: Live) -> None:
    reply = chat(live, "say:abc|")
    submitted = live.engine.submitted[-1]
    assert submitted.params.max_tokens == CONTEXT_LENGTH - reply["usage"]["prompt_tokens"]


def test_max_completion_tokens_is_the_limit_where_both_are_given(live: Live) -> None:
    reply = chat(live, "say:abcdef|", max_tokens=5, max_completion_tokens=3)
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["choices"][0]["finish_reason"] == "length"


def test_text_parts_are_joined(live: Live) -> None:
    parts = [{"type": "text", "text": "say:a"}, {"type": "text", "text": "b|"}]
    reply = live.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert reply["choices"][0]["message"]["content"] == "ab"


def test_a_final_message_can_be_continued_and_echoed(live: Live) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "say:yes|Well, "},
    ]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    reply = live.ok("/v1/chat/completions", {"messages": messages, **fields})
    assert reply["choices"][0]["message"]["content"] == "say:yes|Well, yes"
    prompt = live.service.backend.decode(
        live.engine.submitted[-1].prompt_ids, skip_special_tokens=False
    )
    assert prompt.endswith("<|im_start|>assistant\nsay:yes|Well, ")


def test_prompt_fields_are_at_the_root(live: Live) -> None:
    reply = chat(live, "say:a|", prompt_logprobs=1, return_token_ids=True)
    assert len(reply["prompt_token_ids"]) == len(reply["prompt_logprobs"])
    assert reply["prompt_logprobs"][0] is None
    assert len(reply["choices"][0]["token_ids"]) == 2


def test_each_choice_has_its_own_entries(live: Live) -> None:
    reply = chat(live, "say:ab|", n=3, logprobs=True, top_logprobs=1)
    assert [len(choice["logprobs"]["content"]) for choice in reply["choices"]] == [3] * 3
    assert "metrics" not in reply
