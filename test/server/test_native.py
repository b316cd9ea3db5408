"""POST /generate and /inference/v1/generate."""

from __future__ import annotations

import pytest
from live import Live
from scripted_engine import log_softmax, table_row

IDS = [5, 9, 40, 41, 42, 43, 44, 45, 46, 47]


def generate(live: Live, **fields: object) -> dict | list:
    return live.ok("/generate", fields)


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_b05_entries_ids_and_usage_have_one_length(live: Live, num_tokens: int) -> None:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    reply = generate(live, input_ids=IDS[:5], sampling_params=sampling, return_logprob=True)
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == len(meta["output_token_logprobs"]) == num_tokens
    assert meta["completion_tokens"] == num_tokens
    assert meta["finish_reason"] == {"type": "length", "length": num_tokens}
    first = log_softmax(table_row(IDS[4]))[reply["output_ids"][0]]
    assert meta["output_token_logprobs"][0] == [pytest.approx(first), reply["output_ids"][0], None]


@pytest.mark.parametrize(("start", "count"), [(-1, 0), (0, 10), (4, 6), (9, 1), (10, 0)])
def test_b34_prompt_entries_cover_the_prompt_from_start(live: Live, start: int, count: int) -> None:
    meta = generate(live, input_ids=IDS, return_logprob=True, logprob_start_len=start)["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == IDS[len(IDS) - count :]
    for place, entry in enumerate(entries):
        position = len(IDS) - count + place
        if position == 0:
            assert entry[0] is None
        else:
            row = log_softmax(table_row(IDS[position - 1]))
            assert entry[0] == pytest.approx(row[IDS[position]])


def test_asked_ids_come_in_the_asked_order_with_duplicates(live: Live) -> None:
    reply = generate(
        live,
        input_ids=IDS[:3],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        token_ids_logprob=[7, 3, 7],
        top_logprobs_num=2,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    for row in meta["output_token_ids_logprobs"]:
        assert [entry[1] for entry in row] == [7, 3, 7]
        assert row[0] == row[2]
        assert row[0][2] == live.service.table.text_of(7)
    assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2]
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_token_ids_logprobs"]) == 3


def test_an_asked_id_that_the_mode_filters_is_null(live: Live) -> None:
    worst = int(table_row(IDS[0]).argmin())
    reply = generate(
        live,
        input_ids=IDS[:1],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        token_ids_logprob=[worst],
        logprobs_mode=["processed", "raw"],
    )
    meta = reply["meta_info"]
    assert meta["output_token_ids_logprobs"][0][0][0] is None
    raw = meta["modes"]["raw"]["output_token_ids_logprobs"][0][0][0]
    assert raw == pytest.approx(log_softmax(table_row(IDS[0]))[worst])


def test_b31_a_batch_takes_lists_and_each_prompt_gets_its_own_widths(live: Live) -> None:
    replies = generate(
        live,
        input_ids=[IDS[:3], IDS[:4], IDS[:5]],
        sampling_params={"max_new_tokens": 3, "ignore_eos": True},
        return_logprob=[True, False, True],
        top_logprobs_num=[2, 5, 0],
        token_ids_logprob=[None, None, [8]],
        logprob_start_len=[0, -1, 4],
    )
    first, second, third = (reply["meta_info"] for reply in replies)
    assert [len(row) for row in first["output_top_logprobs"]] == [2, 2, 2]
    assert len(first["input_token_logprobs"]) == 3
    assert "output_token_logprobs" not in second
    assert "output_top_logprobs" not in third
    assert [row[0][1] for row in third["output_token_ids_logprobs"]] == [8, 8, 8]
    assert [entry[1] for entry in third["input_token_logprobs"]] == [IDS[4]]
    alone = generate(
        live,
        input_ids=IDS[:3],
        sampling_params={"max_new_tokens": 3, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
    )
    assert alone["meta_info"]["output_top_logprobs"] == first["output_top_logprobs"]


def test_sampling_parameters_reach_the_engine(live: Live) -> None:
    sampling = {
        "max_new_tokens": 9,
        "min_new_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 1.5,
        "presence_penalty": -1.5,
        "repetition_penalty": 1.1,
        "stop": "x",
        "stop_token_ids": [9],
        "stop_regex": "a{2}",
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"5": 2},
        "sampling_seed": 2**64 - 1,
        "regex": "b+",
    }
    generate(live, text="say:a|", sampling_params=sampling)
    params = live.engine.submitted[-1].params
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 1, 0.5)
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 0, 0.1)
    assert (params.frequency_penalty, params.presence_penalty) == (1.5, -1.5)
    assert (params.repetition_penalty, params.seed) == (1.1, 2**64 - 1)
    assert (params.stop, params.stop_regex, params.stop_token_ids) == (("x",), ("a{2}",), (9,))
    assert (params.ignore_eos, params.include_stop) == (True, True)
    assert not params.skip_special_tokens
    assert not params.spaces_between_special_tokens
    assert params.logit_bias == ((5, 2.0),)
    assert params.grammar is not None
    assert params.grammar.kind == "regex"


def test_max_new_tokens_is_128_unless_given(live: Live) -> None:
    generate(live, text="say:a|")
    assert live.engine.submitted[-1].params.max_tokens == 128


@pytest.mark.parametrize(
    ("sampling", "text", "matched"),
    [
        ({}, "abc", 11),
        ({"stop": "b"}, "a", "b"),
        ({"stop": ["b"], "no_stop_trim": True}, "ab", "b"),
        ({"stop_regex": "b[cd]"}, "a", "b[cd]"),
    ],
)
def test_a_stop_is_reported_with_what_matched(
    live: Live, sampling: dict, text: str, matched: object
) -> None:
    reply = generate(live, text="say:abc|", sampling_params=sampling)
    assert reply["text"] == text
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


def test_several_choices_have_ids_of_their_own_and_different_seeds(live: Live) -> None:
    replies = generate(live, text="say:a|", sampling_params={"n": 3}, rid="mine")
    assert [reply["meta_info"]["id"] for reply in replies] == ["mine-0", "mine-1", "mine-2"]
    assert len({reply["meta_info"]["seed"] for reply in replies}) == 3


def test_speculation_is_counted_from_the_kept_tokens(live: Live) -> None:
    meta = generate(live, text="say:abcdefgh|")["meta_info"]
    kept = meta["completion_tokens"] - 1  # the first came from the prefill
    assert meta["spec_verify_ct"] * meta["spec_accept_length"] == pytest.approx(kept)
    assert meta["spec_num_correct_drafts"] == meta["spec_accept_token_num"] > 0
    assert meta["spec_num_proposed_drafts"] == meta["spec_draft_token_num"]
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    rate = meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_rate"] == pytest.approx(rate)


def test_a_name_in_use_is_refused(live: Live) -> None:
    body = {"text": "hang:", "rid": "twice", "sampling_params": {"max_new_tokens": 3}}
    with live.http.stream("POST", "/generate", json={**body, "stream": True}):
        live.wait(lambda: live.service.client.is_open("twice"))
        reply = live.post("/generate", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "rid")


def test_token_ids_in_and_out(live: Live) -> None:
    sampling = {"max_tokens": 4, "logprobs": 2, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": IDS[:2], "sampling_params": sampling, "request_id": "abc"}
    reply = live.ok("/inference/v1/generate", body)
    choice = reply["choices"][0]
    assert reply["request_id"] == reply["id"] == "abc"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
    assert "text" not in choice
    events = live.events("/inference/v1/generate", body)
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == choice["token_ids"]
    refused = live.post("/inference/v1/generate", {"token_ids": [10**6]})
    assert refused.status_code == 400
