"""Both dialects over the real engine with a tiny model and an n-gram drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from processes import started

PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]


@pytest.fixture(scope="module")
def http(tiny_llama: Path) -> Iterator[httpx.Client]:
    # A fixed draft length: measured costs would tell that drafting does not pay for a tiny model.
    flags = "--speculative-algorithm NGRAM --no-speculative-adaptive --chunked-prefill-size 16"
    with (
        started(tiny_llama, *flags.split()) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def ok(http: httpx.Client, path: str, body: dict) -> dict:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(http: httpx.Client, **fields: object) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 11, "logprobs": 3, "ignore_eos": True}
    return ok(http, "/v1/completions", {**body, "return_token_ids": True, **fields})


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": {"45": 8, "40": -100}, "logprobs_mode": ["processed", "raw"]},
        {"allowed_token_ids": [40, 41, 42, 43], "bad_words": ["a"]},
        {"structured_outputs": {"regex": "(ab|cd)+"}, "ignore_eos": False},
        {"echo": True, "prompt_logprobs": 2, "logprob_token_ids": [50, 51]},
    ],
)
def test_speculation_changes_no_token_and_no_logprob(
    http: httpx.Client, temperature: float, fields: dict
) -> None:
    on = complete(http, temperature=temperature, **fields)
    off = complete(http, temperature=temperature, speculative=False, **fields)
    assert on["choices"] == off["choices"]
    assert off["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_drafts_are_accepted_so_that_the_comparison_means_something(http: httpx.Client) -> None:
    reply = complete(http, allowed_token_ids=[40], temperature=0)
    spec = reply["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    assert spec["num_spec_tokens"] <= reply["usage"]["completion_tokens"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]


@pytest.mark.parametrize(("start", "count"), [(-1, 0), (0, 10), (4, 6), (9, 1), (10, 0)])
def test_b34_prompt_entries_do_not_depend_on_the_prefix_cache(
    http: httpx.Client, start: int, count: int
) -> None:
    prompt = [60 + start, *PROMPT[1:]] * 4  # longer than a page and a chunk
    first = len(prompt) - count if start >= 0 else -1
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": first}
    body["sampling_params"] = {"max_new_tokens": 2, "temperature": 0}
    ok(http, "/flush_cache", {})
    cold, warm = (ok(http, "/generate", body)["meta_info"] for _ in range(2))
    assert len(cold["input_token_logprobs"]) == count
    assert cold["input_token_logprobs"] == warm["input_token_logprobs"]
    assert cold["output_token_logprobs"] == warm["output_token_logprobs"]
    assert warm["cached_tokens"] > 0 or count > 8


@pytest.mark.parametrize("start", [11, -2])
def test_b34_a_start_outside_the_prompt_is_400(http: httpx.Client, start: int) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": start}
    reply = http.post("/generate", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprob_start_len")


def test_b31_requests_of_one_batch_get_what_they_get_alone(http: httpx.Client) -> None:
    asked = [
        {"logprobs": None},
        {"logprobs": 0},
        {"logprobs": 5, "temperature": 1.3},
        {"logprobs": 2, "speculative": False},
        {"logprobs": None, "logprob_token_ids": [44, 45]},
        {"logprobs": 1, "structured_outputs": {"choice": ["abab", "cd"]}, "ignore_eos": False},
    ]
    alone = [complete(http, **fields)["choices"] for fields in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda fields: complete(http, **fields)["choices"], asked))
    assert together == alone
    shown = [choices[0]["logprobs"] for choices in alone]
    assert shown[0] is None
    widths = [len(logprobs["top_logprobs"][0]) for logprobs in shown[1:]]
    assert widths[0] == 1  # the chosen one
    assert widths[1] in (5, 6)
    assert widths[2] in (2, 3)
    assert widths[3] in (2, 3)


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_b05_entries_ids_and_usage_have_one_length(http: httpx.Client, num_tokens: int) -> None:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": PROMPT[:5], "sampling_params": sampling, "return_logprob": True}
    reply = ok(http, "/generate", body)
    meta = reply["meta_info"]
    lengths = {len(reply["output_ids"]), len(meta["output_token_logprobs"])}
    assert lengths == {meta["completion_tokens"]} == {num_tokens}


@pytest.mark.parametrize("place", [1, 2, 3, 5, 8])
def test_b10_a_stop_at_any_place_in_a_draft_cuts_like_plain_decoding(
    http: httpx.Client, place: int
) -> None:
    base = complete(http, allowed_token_ids=[40, 41, 42], temperature=1)["choices"][0]["token_ids"]
    fields = {"allowed_token_ids": [40, 41, 42], "temperature": 1, "stop_token_ids": [base[place]]}
    on = complete(http, **fields)
    off = complete(http, speculative=False, **fields)
    assert on["choices"] == off["choices"]
    ids = on["choices"][0]["token_ids"]
    assert ids == base[: base.index(base[place]) + 1]
    assert on["usage"]["completion_tokens"] == len(ids)


def test_a_stream_over_drafts_joins_to_the_whole_reply(http: httpx.Client) -> None:
    whole = complete(http, allowed_token_ids=[40, 41])["choices"][0]
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 11, "logprobs": 3, "ignore_eos": True}
    body |= {"allowed_token_ids": [40, 41], "stream": True}
    reply = http.post("/v1/completions", json=body)
    lines = [line[6:] for line in reply.text.split("\n\n") if line]
    chunks = [httpx.Response(200, text=line).json()["choices"][0] for line in lines[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    entries = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for entry in entries for value in entry[name]] == values


def test_max_tokens_0_scores_and_frees_everything(http: httpx.Client) -> None:
    choice = complete(http, max_tokens=0, echo=True)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert choice["token_ids"] == []
    load = http.get("/v1/loads").json()["loads"][0]
    assert (load["num_reqs"], load["num_tokens"]) == (0, 0)


def test_no_reply_waits_for_the_acknowledgement_of_its_head(http: httpx.Client) -> None:
    """Two writes on a socket that delays small ones take 40 ms, every time but the first."""
    seconds = []
    for _ in range(12):
        begin = time.perf_counter()
        assert http.get("/health").status_code == 200
        seconds.append(time.perf_counter() - begin)
    assert min(seconds[3:]) < 0.03


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_b35_masks_and_filters_leave_valid_json_and_finite_values(
    http: httpx.Client, mode: str
) -> None:
    asks = [
        {"structured_outputs": {"choice": ["aaaa"]}, "ignore_eos": False, "logprobs": 5},
        {"top_k": 1, "echo": True, "logprobs": 5},
    ]
    for fields in asks:
        choice = complete(http, logprobs_mode=mode, temperature=1, **fields)["choices"][0]
        logprobs = choice["logprobs"]
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            assert value is None or -1000 < value <= 0
            assert top is None or all(-1000 < other <= 0 for other in top.values())
            assert top is None or len(top) <= 6
        if mode == "processed":
            assert logprobs["token_logprobs"][-1] == pytest.approx(0)


def test_a_grammar_may_name_special_tokens(http: httpx.Client) -> None:
    grammar = {"grammar": 'start: "ab" <|im_end|>'}
    fields = {"structured_outputs": grammar, "ignore_eos": False, "skip_special_tokens": False}
    choice = complete(http, include_stop_str_in_output=True, **fields)["choices"][0]
    assert choice["text"] == "ab<|im_end|>"
    body = {"prompt": PROMPT, "structured_outputs": {"grammar": "start: <|nobody|>"}}
    reply = http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs")
