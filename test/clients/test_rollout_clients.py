"""What RL trainers read from replies, as functions of the reply alone.

TRL (its vLLM client), verl and slime (their SGLang roll-outs) need GPUs to run. Each function here
lists the fields that such a client takes from a reply, and fails as the client would.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from api_client import ApiClient

PROMPTS = [[40, 41, 42, 43, 40, 41, 42], [50, 51, 52]]
NUM_TOKENS = 12


class Rollout(NamedTuple):
    """Tokens of a response, their logprobs, and why it ended."""

    token_ids: list[int]
    logprobs: list[float]
    reason: str


def read_by_trl(reply: dict, num_choices: int) -> tuple[list[list[int]], list[Rollout]]:
    """TRL: `choices` in prompt-major order; of each `token_ids`, and of the first of each prompt
    `prompt_token_ids`; `logprobs.tokens`, `token_logprobs` and `top_logprobs` with every token
    written `token_id:<n>`. The best alternatives come first after sorting by value."""
    choices = reply["choices"]
    prompts = [choice["prompt_token_ids"] for choice in choices[::num_choices]]
    rollouts = []
    for choice in choices:
        shown = choice["logprobs"]
        chosen = []
        for token, value, top in zip(
            shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
        ):
            merged = {token: value, **(top or {})}
            ids = [int(name.removeprefix("token_id:")) for name in merged]
            assert all(name.startswith("token_id:") for name in merged)
            assert not any(math.isnan(other) for other in merged.values())
            chosen.append((ids[0], value))
        assert [token_id for token_id, _ in chosen] == choice["token_ids"]
        values = [value for _, value in chosen]
        rollouts.append(Rollout(choice["token_ids"], values, choice["finish_reason"]))
    return prompts, rollouts


def read_by_trl_from_ids(reply: dict) -> list[Rollout]:
    """TRL on /inference/v1/generate: chat-shaped entries, `token_ids`."""
    rollouts = []
    for choice in reply["choices"]:
        entries = choice["logprobs"]["content"]
        ids = [int(entry["token"].removeprefix("token_id:")) for entry in entries]
        assert ids == choice["token_ids"]
        values = [entry["logprob"] for entry in entries]
        rollouts.append(Rollout(ids, values, choice["finish_reason"]))
    return rollouts


def read_by_verl(reply: dict) -> Rollout:
    """verl: `output_ids`, triples of `meta_info.output_token_logprobs` in the same number,
    `finish_reason.type`, and with MTP `spec_draft_token_num`, `spec_accept_token_num`,
    `spec_verify_ct`."""
    meta = reply["meta_info"]
    logprobs = [float(logprob) for logprob, _, _ in meta["output_token_logprobs"]]
    assert len(logprobs) == len(reply["output_ids"])
    for name in ("spec_draft_token_num", "spec_accept_token_num", "spec_verify_ct"):
        assert int(meta[name]) >= 0
    return Rollout(list(reply["output_ids"]), logprobs, meta["finish_reason"]["type"])


def read_by_verls_teacher(reply: dict, num_prompt: int, top_k: int) -> list[list[float]]:
    """verl's distillation teacher: with `logprob_start_len` 0 one entry per prompt token, the
    first without a value; of the others `top_k` triples of `input_top_logprobs`, or the token's."""
    meta = reply["meta_info"]
    entries = meta["input_token_logprobs"]
    assert len(entries) == num_prompt
    assert entries[0][0] is None
    if top_k == 0:
        return [[float(logprob)] for logprob, _, _ in entries[1:]]
    tops = meta["input_top_logprobs"]
    assert len(tops) == num_prompt
    assert tops[0] is None
    assert all(len(top) == top_k for top in tops[1:])
    return [[float(logprob) for logprob, _, _ in top] for top in tops[1:]]


def read_by_slime(reply: dict) -> Rollout:
    """slime: ids and logprobs from `meta_info.output_token_logprobs` alone, `text`,
    `finish_reason.type` (length, abort or stop), `prompt_tokens`, `completion_tokens`,
    `cached_tokens`, and the counts of speculation."""
    meta = reply["meta_info"]
    ids = [item[1] for item in meta["output_token_logprobs"]]
    logprobs = [item[0] for item in meta["output_token_logprobs"]]
    assert isinstance(reply["text"], str)
    assert meta["completion_tokens"] == len(ids)
    assert meta["cached_tokens"] <= meta["prompt_tokens"]
    assert meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
    assert meta["spec_verify_ct"] > 0
    reason = meta["finish_reason"]["type"]
    assert reason in ("length", "abort", "stop")
    return Rollout(ids, logprobs, reason)


def trl_body(num_choices: int) -> dict:
    """What TRL's client sends beside the prompt."""
    return {
        "n": num_choices,
        "repetition_penalty": 1.0,
        "temperature": 2.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": NUM_TOKENS,
        "logprobs": 0,
        "seed": 3,
        "ignore_eos": True,
    }


def slime_sampling(**fields: object) -> dict:
    """The sampling parameters of slime's roll-outs."""
    return {
        "temperature": 2.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": NUM_TOKENS,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 3,
        **fields,
    }


def test_trl_finds_prompts_completions_and_logprobs(dspark: ApiClient, plain: ApiClient) -> None:
    body = {"prompt": PROMPTS, "return_token_ids": True, "return_tokens_as_token_ids": True}
    read = [
        read_by_trl(client.ok("/v1/completions", body | trl_body(2)), 2)
        for client in (dspark, plain)
    ]
    assert read[0] == read[1]
    prompts, rollouts = read[0]
    assert prompts == PROMPTS
    assert [len(one.logprobs) for one in rollouts] == [NUM_TOKENS] * 4


def test_trl_finds_the_same_by_ids(dspark: ApiClient) -> None:
    sampling = {**trl_body(2), "output_kind": 2, "return_tokens_as_token_ids": True}
    body = {"request_id": "trl-1", "token_ids": PROMPTS[0], "features": None}
    found = read_by_trl_from_ids(
        dspark.ok("/inference/v1/generate", {**body, "sampling_params": sampling})
    )
    again = {"prompt": PROMPTS[0], "return_token_ids": True, "return_tokens_as_token_ids": True}
    assert found == read_by_trl(dspark.ok("/v1/completions", again | trl_body(2)), 2)[1]


@pytest.mark.parametrize("top_k", [0, 2])
def test_verl_finds_tokens_logprobs_and_the_teachers_values(dspark: ApiClient, top_k: int) -> None:
    sampling = {"temperature": 2.0, "max_new_tokens": NUM_TOKENS, "sampling_seed": 3}
    body = {"rid": f"verl-{top_k}", "input_ids": PROMPTS[0], "image_data": None}
    body |= {"sampling_params": sampling, "return_logprob": True}
    body |= {"logprob_start_len": 0, "top_logprobs_num": top_k}
    reply = dspark.ok("/generate", body)
    assert len(read_by_verl(reply).token_ids) == NUM_TOKENS
    teacher = read_by_verls_teacher(reply, len(PROMPTS[0]), top_k)
    assert [len(values) for values in teacher] == [max(top_k, 1)] * (len(PROMPTS[0]) - 1)


def test_slime_finds_tokens_in_the_entries_and_goes_on_where_it_was_cut(dspark: ApiClient) -> None:
    body = {"input_ids": PROMPTS[0], "return_logprob": True, "sampling_params": slime_sampling()}
    whole = read_by_slime(dspark.ok("/generate", body))
    assert (len(whole.token_ids), whole.reason) == (NUM_TOKENS, "length")
    body["sampling_params"] = slime_sampling(max_new_tokens=5)
    begun = read_by_slime(dspark.ok("/generate", body))
    # The rest of a cut response: the noise is a function of seed and position alone.
    body["input_ids"] = PROMPTS[0] + begun.token_ids
    body["sampling_params"] = slime_sampling(max_new_tokens=NUM_TOKENS - 5)
    rest = read_by_slime(dspark.ok("/generate", body))
    assert begun.token_ids + rest.token_ids == whole.token_ids
    assert begun.logprobs + rest.logprobs == whole.logprobs


def test_slime_aborts_all_and_reads_the_load(dspark: ApiClient) -> None:
    assert dspark.ok("/abort_request", {"abort_all": True})["num_aborted"] == 0
    load = dspark.http.get("/v1/loads", params={"include": "core"}).json()
    assert sum(item["num_reqs"] for item in load["loads"]) == 0


def test_top_p_ids_are_refused_by_name(dspark: ApiClient) -> None:
    """slime asks for them when it filters; without them its loss would be another one."""
    sampling = slime_sampling(top_p=0.9, custom_params={"return_top_p_token_ids": True})
    reply = dspark.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": sampling})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "custom_params")
