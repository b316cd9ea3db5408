"""Known faults of serving engines, asked of every worker through the API; see docs/cases.md.

The plain worker is the oracle of the others, transformers that of the plain one. Requests are
sampled hot, so that random drafters are accepted now and then; a test makes sure that they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from workers import EOS_IDS

from api_client import ApiClient
from tiny import SPECIAL_TOKENS, tiny_model, tiny_tokenizer

PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
HOT = {"temperature": 3, "seed": 11, "ignore_eos": True}
COLD = {"temperature": 0, "ignore_eos": True}
TWO_TOKENS = {**HOT, "allowed_token_ids": [40, 41]}  # repeats itself: n-gram drafts are accepted
LETTERS = [i for i in range(3, 300) if tiny_tokenizer().decode([i]).strip(" abcdefghinorst") == ""]


def complete(client: ApiClient, **fields: object) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 24, "logprobs": 3, "return_token_ids": True}
    return client.ok("/v1/completions", {**body, **HOT, **fields})


def generate(client: ApiClient, sampling: dict, **fields: object) -> dict:
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    return client.ok("/generate", {**body, **fields})


def choices(client: ApiClient, **fields: object) -> list[dict]:
    return complete(client, **fields)["choices"]


@pytest.fixture(scope="module")
def oracle():
    """Logprobs of every next token, by a teacher-forced pass of transformers: [n, vocab]."""
    model = tiny_model("llama")

    def logprobs(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_b05_ids_entries_and_usage_agree_and_values_are_the_models(
    worker: ApiClient, oracle, num_tokens: int
) -> None:
    sampling = {"max_new_tokens": num_tokens, "temperature": 3, "ignore_eos": True}
    reply = generate(worker, sampling, input_ids=PROMPT[:5])
    entries = reply["meta_info"]["output_token_logprobs"]
    ids = reply["output_ids"]
    assert [entry[1] for entry in entries] == ids
    assert len(ids) == reply["meta_info"]["completion_tokens"] == num_tokens
    rows = oracle([*PROMPT[:5], *ids])
    wanted = [rows[4 + place, token_id].item() for place, token_id in enumerate(ids)]
    assert [entry[0] for entry in entries] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        HOT,
        TWO_TOKENS,
        {"temperature": 1, "top_p": 0.9, "min_p": 0.001, "top_k": 90},
        {**COLD, "logprobs": 8},
        {"frequency_penalty": 0.7, "logprobs_mode": ["processed", "raw"], "logprobs": 1},
        {"temperature": 0.6, "logprobs": 0},
    ],
)
def test_b40_tokens_and_logprobs_are_those_of_plain_decoding(
    plain: ApiClient, drafting: ApiClient, fields: dict
) -> None:
    mine, wanted = complete(drafting, **fields), complete(plain, **fields)
    assert mine["choices"] == wanted["choices"]
    assert mine["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]


def test_b40_drafts_are_accepted_and_refused_so_that_the_cases_mean_something(
    drafting: ApiClient,
) -> None:
    replies = [complete(drafting, max_tokens=48, **f) for f in (HOT, TWO_TOKENS, {"seed": 5})]
    spec = [reply["metrics"]["speculative_decoding"] for reply in replies]
    accepted = sum(one["num_accepted_draft_tokens"] for one in spec)
    assert 10 < accepted < sum(one["num_draft_tokens"] for one in spec)
    for one, reply in zip(spec, replies, strict=True):
        assert one["num_spec_tokens"] <= reply["usage"]["completion_tokens"]
        assert sum(one["acceptance_histogram"]) == one["num_spec_steps"]


def test_b07_a_token_budget_cuts_everywhere_in_a_draft(worker: ApiClient) -> None:
    whole = choices(worker)[0]
    for num_tokens in range(1, 9):
        reply = complete(worker, max_tokens=num_tokens)
        choice = reply["choices"][0]
        assert choice["token_ids"] == whole["token_ids"][:num_tokens]
        for name, values in choice["logprobs"].items():
            assert values == whole["logprobs"][name][:num_tokens]
        assert reply["usage"]["completion_tokens"] == num_tokens
        assert choice["finish_reason"] == "length"
    assert choices(worker)[0] == whole


def cut_by_hand(texts: list[str], stop: str) -> tuple[str, int]:
    """Text before the first match of `stop`, and how many tokens begin before the match's end."""
    text = "".join(texts)
    start = text.index(stop)
    begins = [len("".join(texts[:place])) for place in range(len(texts))]
    return text[:start], sum(begin < start + len(stop) for begin in begins)


@pytest.mark.parametrize("stream", [False, True])
def test_b09_a_stop_string_trims_text_ids_logprobs_and_usage_alike(
    worker: ApiClient, stream: bool
) -> None:
    fields = {"allowed_token_ids": LETTERS, "temperature": 9, "max_tokens": 32}
    whole = choices(worker, **fields)[0]
    texts = whole["logprobs"]["tokens"]
    assert "".join(texts) == whole["text"]
    for place in (1, 4, 9, 15, 22):
        stop = whole["text"][place : place + 3]
        text, count = cut_by_hand(texts, stop)
        body = {"stop": stop, "stream_options": {"include_usage": True} if stream else None}
        if stream:
            asked = {"prompt": PROMPT, "logprobs": 3, "return_token_ids": True, **HOT}
            chunks = worker.events("/v1/completions", {**asked, **fields, **body})
            parts = [chunk["choices"][0] for chunk in chunks[:-1]]
            shown = "".join(part["text"] for part in parts)
            ids = [i for part in parts for i in part["token_ids"]]
            tokens = [t for part in parts if part["logprobs"] for t in part["logprobs"]["tokens"]]
            usage, finish = chunks[-1]["usage"], parts[-1]
        else:
            reply = complete(worker, **fields, **body)
            finish = reply["choices"][0]
            shown, ids, usage = finish["text"], finish["token_ids"], reply["usage"]
            tokens = finish["logprobs"]["tokens"]
        assert (shown, ids, tokens) == (text, whole["token_ids"][:count], texts[:count])
        assert usage["completion_tokens"] == count
        assert (finish["finish_reason"], finish["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("eos", EOS_IDS)
def test_b11_every_end_id_ends_and_has_its_entry(worker: ApiClient, eos: int) -> None:
    fields = {"ignore_eos": False, "logit_bias": {str(eos): 100}, "min_tokens": 5}
    choice = choices(worker, **fields)[0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 6
    assert (choice["token_ids"][-1], choice["finish_reason"]) == (eos, "stop")
    shown = [text for text in choice["logprobs"]["tokens"][:-1] if text not in SPECIAL_TOKENS]
    assert len(shown) == 5
    sampling = {"temperature": 3, "sampling_seed": 11, "min_new_tokens": 5}
    native = generate(worker, {**sampling, "logit_bias": {str(eos): 100}})
    assert native["output_ids"] == choice["token_ids"]
    assert len(native["meta_info"]["output_token_logprobs"]) == 6
    assert native["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    body = {"prompt": PROMPT, "logprobs": 3, **HOT, **fields}
    parts = [event["choices"][0] for event in worker.events("/v1/completions", body)]
    assert [t for part in parts for t in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
    assert "".join(part["text"] for part in parts) == choice["text"]


def test_b13_a_chat_stream_joins_to_the_whole_reply_entry_by_entry(worker: ApiClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    body |= {"max_tokens": 24, "stream_options": None, **HOT}
    whole = worker.ok("/v1/chat/completions", body)["choices"][0]
    body["stream_options"] = {"include_usage": True}
    *chunks, last = worker.events("/v1/chat/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert "".join(part["delta"]["content"] for part in parts) == whole["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 24)


@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_b29_alternatives_are_the_k_best_of_the_model_and_the_chosen_one(
    worker: ApiClient, oracle, top_k: int
) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 3, "sampling_seed": 7, "ignore_eos": True}
    reply = generate(worker, sampling, top_logprobs_num=top_k)
    rows = oracle([*PROMPT, *reply["output_ids"]])[len(PROMPT) - 1 :]
    tops = reply["meta_info"].get("output_top_logprobs", [[]] * 8)
    for row, top in zip(rows, tops, strict=False):
        best = row.topk(max(top_k, 1))
        assert [entry[1] for entry in top] == best.indices.tolist()[:top_k]
        assert [entry[0] for entry in top] == pytest.approx(best.values.tolist()[:top_k], abs=1e-4)
    fields = {"temperature": 3, "seed": 7, "max_tokens": 8, "logprobs": top_k}
    shown = choices(worker, **fields, return_tokens_as_token_ids=True)[0]
    for token_id, top in zip(shown["token_ids"], shown["logprobs"]["top_logprobs"], strict=True):
        name = f"token_id:{token_id}"
        assert name in top
        assert len([other for other in top if other != name]) in (top_k, max(0, top_k - 1))


def test_b31_requests_of_one_batch_get_what_plain_decoding_gives_them_alone(
    plain: ApiClient, worker: ApiClient
) -> None:
    asked = [
        {"logprobs": None},
        {"logprobs": 0},
        {"logprobs": 5},
        {"logprobs": 2, "temperature": 0},
        {"logprobs": None, "logprob_token_ids": [44, 45]},
        {"logprobs": 1, "structured_outputs": {"choice": ["abab", "cd"]}, "ignore_eos": False},
    ]
    alone = [choices(plain, **fields) for fields in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda fields: choices(worker, **fields), asked))
    assert together == alone


@pytest.mark.parametrize("start", [-1, 0, 4, 9, 10])
def test_b34_prompt_entries_depend_on_no_chunk_and_no_prefix_hit(
    plain: ApiClient, worker: ApiClient, start: int
) -> None:
    prompt = [60 + start, *PROMPT[1:]] * 4  # longer than a page and most chunks
    first = start if start < 5 else len(prompt) - 10 + start
    sampling = {"max_new_tokens": 2, "temperature": 0}
    fields = {"input_ids": prompt, "logprob_start_len": first, "top_logprobs_num": 2}
    worker.ok("/flush_cache", {})
    cold, warm = (generate(worker, sampling, **fields)["meta_info"] for _ in range(2))
    wanted = generate(plain, sampling, **fields)["meta_info"]
    entries = cold["input_token_logprobs"]
    assert len(entries) == (len(prompt) - first if first >= 0 else 0)
    assert [entry[0] is None for entry in entries] == [first == 0] * bool(entries) + [False] * (
        len(entries) - 1
    )
    for name in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"):
        assert cold[name] == warm[name] == wanted[name]


@pytest.mark.parametrize("start", [11, -2])
def test_b34_a_start_outside_the_prompt_is_400(worker: ApiClient, start: int) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": start}
    reply = worker.post("/generate", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprob_start_len")


def test_b35_masks_and_filters_leave_finite_values_of_strict_json(worker: ApiClient) -> None:
    forced = {"structured_outputs": {"choice": ["aaaa"]}, "ignore_eos": False, "logprobs": 5}
    for fields in (forced, {"top_k": 1, "echo": True, "logprobs": 5}):
        body = {"prompt": PROMPT, **HOT, **fields, "logprobs_mode": "processed", "max_tokens": 8}
        whole = worker.ok("/v1/completions", body)["choices"][0]["logprobs"]
        parts = [
            event["choices"][0]["logprobs"] for event in worker.events("/v1/completions", body)
        ]
        for name, values in whole.items():
            assert [value for part in parts if part for value in part[name]] == values
        assert whole["token_logprobs"][-1] == pytest.approx(0, abs=1e-5)
        for value, top in zip(whole["token_logprobs"], whole["top_logprobs"], strict=True):
            assert value is None or -1000 < value <= 0
            assert top is None or len(top) <= 6
            assert top is None or all(-1000 < other <= 0 for other in top.values())


def test_b37_offsets_count_characters_with_echo_and_fragments(worker: ApiClient) -> None:
    fields = {"prompt": "é", "echo": True, "ignore_eos": False, "max_tokens": 8, "logprobs": 1}
    fields |= {"structured_outputs": {"choice": ["ab€c"]}}
    shown = choices(worker, **fields)[0]
    assert shown["text"] == "éab€c"
    offsets = [0, 0, 1, 2, 3, 3, 3, 4]  # two tokens of é, a, b, three of €, c
    assert shown["logprobs"]["text_offset"] == offsets
    assert shown["logprobs"]["tokens"][4].startswith("bytes:")
    events = worker.events("/v1/completions", {**HOT, **fields})
    parts = [event["choices"][0] for event in events]
    assert [o for part in parts if part["logprobs"] for o in part["logprobs"]["text_offset"]] == (
        offsets
    )


def test_x01_a_bad_request_lists_its_fields_and_20_others_finish(
    plain: ApiClient, worker: ApiClient
) -> None:
    bad = {"prompt": PROMPT, "logprobs": 99, "prompt_logprobs": -1, "n": 0, "suffix": "x"}
    wanted = choices(plain, max_tokens=6)
    with ThreadPoolExecutor(20) as pool:
        running = [pool.submit(choices, worker, max_tokens=6) for _ in range(20)]
        refused = worker.post("/v1/completions", bad)
        assert all(one.result() == wanted for one in running)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert all(name in message for name in ("logprobs", "prompt_logprobs", "n", "suffix"))


def test_x05_a_seed_repeats_alone_and_in_a_batch_and_no_seed_does_not(worker: ApiClient) -> None:
    alone = [choices(worker, seed=seed, max_tokens=12) for seed in (1, 2)]
    body = {"max_tokens": 12, "seed": 1, "prompt": [PROMPT, PROMPT[:4], PROMPT]}
    together = choices(worker, **body)
    assert together[0]["token_ids"] == together[2]["token_ids"] == alone[0][0]["token_ids"]
    assert alone[0][0]["token_ids"] != alone[1][0]["token_ids"]
    unseeded = [choices(worker, seed=None, max_tokens=12)[0] for _ in range(2)]
    assert unseeded[0]["token_ids"] != unseeded[1]["token_ids"]
    again = choices(worker, seed=unseeded[0]["seed"], max_tokens=12)[0]
    assert again == unseeded[0]


def test_choices_of_one_prompt_share_its_pages_and_repeat_by_their_seeds(
    worker: ApiClient,
) -> None:
    prompt = [99, *PROMPT] * 4
    sampling = {"max_new_tokens": 8, "temperature": 3, "sampling_seed": 3, "ignore_eos": True}
    worker.ok("/flush_cache", {})
    replies = generate(worker, {**sampling, "n": 3}, input_ids=prompt)
    cached = [reply["meta_info"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0
    assert min(cached[1:]) >= 32
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 3
    for reply in replies:
        seed = reply["meta_info"]["seed"]
        again = generate(worker, {**sampling, "sampling_seed": seed}, input_ids=prompt)
        assert again["output_ids"] == reply["output_ids"]
        names = ("output_token_logprobs", "finish_reason", "seed")
        assert [again["meta_info"][n] for n in names] == [reply["meta_info"][n] for n in names]
