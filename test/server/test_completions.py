"""POST /v1/completions: shapes, echo, offsets, stops, seeds, extensions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from live import Live
from scripted_engine import VOCAB_SIZE, log_softmax, table_row

from truespec.params import choice_seed


def ids_of(live: Live, text: str) -> list[int]:
    return live.service.backend.encode(text, False)


def complete(live: Live, prompt: object, **fields: object) -> dict:
    return live.ok("/v1/completions", {"prompt": prompt, "max_tokens": 64, **fields})


def test_text_ids_logprobs_and_usage_have_the_same_tokens(live: Live) -> None:
    reply = complete(live, "say:hello|", logprobs=2, return_token_ids=True)
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hello"
    lengths = {len(logprobs[name]) for name in logprobs} | {len(choice["token_ids"])}
    assert lengths == {reply["usage"]["completion_tokens"]} == {6}
    assert choice["token_ids"][:-1] == ids_of(live, "hello")
    assert choice["prompt_token_ids"] == ids_of(live, "say:hello|")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_each_logprob_is_that_of_the_tokens_own_row(live: Live) -> None:
    choice = complete(live, [5, 9], max_tokens=20, logprobs=3, return_token_ids=True)["choices"][0]
    ids = [9, *choice["token_ids"]]
    for place, (previous, token_id) in enumerate(pairwise(ids)):
        row = log_softmax(table_row(previous))
        assert choice["logprobs"]["token_logprobs"][place] == pytest.approx(row[token_id])
        best = sorted(row.tolist(), reverse=True)[:3]
        assert list(choice["logprobs"]["top_logprobs"][place].values()) == pytest.approx(best)


def test_b29_the_chosen_token_is_added_where_it_is_not_among_the_best(live: Live) -> None:
    logprobs = complete(live, "say:hi|", logprobs=2)["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) in (2, 3)


def test_b38_logprobs_0_gives_values_without_alternatives(live: Live) -> None:
    logprobs = complete(live, "say:hi|", logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[t] for t in logprobs["tokens"]]
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"])


@pytest.mark.parametrize(("value", "asked"), [(True, True), (False, False), (None, False)])
def test_boolean_logprobs_count_as_one_or_none(live: Live, value: object, asked: bool) -> None:
    logprobs = complete(live, "say:hi|", logprobs=value)["choices"][0]["logprobs"]
    assert (logprobs is not None) == asked
    if logprobs is not None:
        assert all(len(top) <= 2 for top in logprobs["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_b37_offsets_count_characters_of_the_returned_text(live: Live, stream: bool) -> None:
    body = {"prompt": "é say:a€b|", "echo": True, "logprobs": 0, "max_tokens": 64}
    text, offsets, tokens = "", [], []
    for reply in live.events("/v1/completions", body) if stream else [complete(live, **body)]:
        choice = reply["choices"][0]
        text += choice["text"]
        if choice["logprobs"]:
            offsets += choice["logprobs"]["text_offset"]
            tokens += choice["logprobs"]["tokens"]
    assert text == "é say:a€b|a€b"
    prompt = [0, 0, *range(1, 7), 7, 7, 7, 8, 9]  # two bytes of é, ..., three of the euro sign
    assert offsets == [*prompt, *[10, 11, 11, 11, 12, 13]]
    assert tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_an_evaluation_harness_gets_exactly_its_entries(live: Live) -> None:
    prompts = [[5, 9, 40], [7, 8], [30, 31, 32, 33]]
    reply = complete(live, prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(logprobs[name]) for name in logprobs} == {len(prompt) + 1}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        for place in range(1, len(prompt)):
            row = log_softmax(table_row(prompt[place - 1]))
            assert logprobs["token_logprobs"][place] == pytest.approx(row[prompt[place]])
        chosen = logprobs["token_logprobs"][-1]
        assert chosen == max(logprobs["top_logprobs"][-1].values())
    assert reply["usage"]["prompt_tokens"] == 9
    assert reply["usage"]["completion_tokens"] == 3


def test_max_tokens_0_only_scores_the_prompt(live: Live) -> None:
    reply = complete(live, [5, 9, 40], echo=True, logprobs=1, max_tokens=0)
    choice = reply["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 0)


def test_an_end_token_is_in_ids_and_logprobs_and_its_text_is_hidden(live: Live) -> None:
    for text, eos in (("ab", 2), ("abc", 11)):  # the scripted engine ends with either
        choice = complete(live, f"say:{text}|", logprobs=1, return_token_ids=True)["choices"][0]
        assert choice["text"] == text
        assert choice["token_ids"][-1] == eos
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<|im_end|>"),
        ({"skip_special_tokens": False}, "ab"),
        ({"stop": "b"}, "a"),
        ({"stop": ["zzz", "b"], "include_stop_str_in_output": True}, "ab"),
    ],
)
def test_what_is_shown_of_a_stop(live: Live, fields: dict, text: str) -> None:
    assert complete(live, "say:ab|", **fields)["choices"][0]["text"] == text


def test_a_stop_string_trims_text_ids_logprobs_and_usage_and_aborts_the_rest(live: Live) -> None:
    reply = complete(
        live, "say:one two three|", stop=[" t"], logprobs=1, return_token_ids=True, max_tokens=99
    )
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", " t")
    assert choice["token_ids"] == ids_of(live, "one t")
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["completion_tokens"] == 5
    live.wait(lambda: live.engine.num_running == 0)


def test_a_stop_token_id_is_reported_as_the_reason(live: Live) -> None:
    (stop,) = ids_of(live, "c")
    choice = complete(live, "say:abcd|", stop_token_ids=[stop])["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", stop)


def test_choices_are_prompt_major_and_report_seeds_that_repeat_them(live: Live) -> None:
    reply = complete(live, ["say:a|", "say:b|"], n=2, seed=77)
    assert [choice["text"] for choice in reply["choices"]] == ["a", "a", "b", "b"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    seeds = [choice["seed"] for choice in reply["choices"]]
    assert seeds == [77, choice_seed(77, 1)] * 2
    complete(live, "say:a|", seed=seeds[1])
    assert live.engine.submitted[-1].params.seed == seeds[1]
    assert reply["usage"]["prompt_tokens"] == 2 * len(ids_of(live, "say:a|"))


def test_unseeded_requests_get_different_seeds(live: Live) -> None:
    replies = [complete(live, "say:a|", seed=seed) for seed in (None, -1, None)]
    assert len({reply["choices"][0]["seed"] for reply in replies}) == 3


def test_every_sampling_field_reaches_the_engine(live: Live) -> None:
    complete(
        live,
        "say:a|",
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "8": 1.5},
        stop=["x"],
        stop_token_ids=[4],
        ignore_eos=True,
        allowed_token_ids=list(range(3, VOCAB_SIZE)),
        bad_words=["ha"],
        speculative=False,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=True,
        structured_outputs={"regex": "a+"},
        logprob_token_ids=[5, 5],
        logprobs_mode=["processed", "raw"],
    )
    params = live.engine.submitted[-1].params
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 1, 0.5)
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == ((7, -100.0), (8, 1.5))
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x",), (4,), True)
    assert params.allowed_token_ids == tuple(range(3, VOCAB_SIZE))
    assert params.bad_words_ids == (tuple(ids_of(live, "ha")), tuple(ids_of(live, " ha")))
    assert not params.speculative
    assert not params.skip_special_tokens
    assert not params.spaces_between_special_tokens
    assert params.include_stop
    assert params.grammar is not None
    assert (params.grammar.kind, params.grammar.text) == ("regex", "a+")
    assert params.logprobs is not None
    assert (params.logprobs.token_ids, params.logprobs.modes) == ((5, 5), ("processed", "raw"))


def test_asked_ids_and_further_modes_are_shown_beside_the_standard_fields(live: Live) -> None:
    logprobs = complete(
        live, "say:ab|", logprobs=1, logprob_token_ids=[40], logprobs_mode=["raw", "temperature"]
    )["choices"][0]["logprobs"]
    name = live.service.table.text_of(40)
    assert all(name in top for top in logprobs["top_logprobs"])
    other = logprobs["modes"]["temperature"]["token_logprobs"]
    assert len(other) == len(logprobs["tokens"])
    assert other != logprobs["token_logprobs"]


def test_a_filtered_asked_id_is_below_range_and_never_null(live: Live) -> None:
    row = table_row(ids_of(live, "|")[0])
    worst = int(row.argmin())
    fields = {"logprob_token_ids": [worst], "logprobs_mode": "processed", "logprobs": 0}
    top = complete(live, "say:ab|", **fields)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top[live.service.table.text_of(worst)] == -9999.0


def test_token_details_tell_where_each_token_came_from(live: Live) -> None:
    reply = complete(live, "say:abcdefgh|", logprobs=0, token_details=True)
    details = reply["choices"][0]["logprobs"]["token_details"]
    assert details[0]["origin"] == "prefill"
    assert {detail["origin"] for detail in details} == {"prefill", "draft", "target"}
    for detail in details:
        is_draft = detail["origin"] == "draft"
        assert (detail["accepted_position"] is not None) == is_draft
        assert (detail["draft_logprob"] is not None) == is_draft
        assert detail["rank"] >= 1
        assert detail["entropy"] == 1.5
    spec = reply["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] == sum(d["origin"] == "draft" for d in details)
    assert spec["num_spec_tokens"] == sum(d["origin"] != "prefill" for d in details)
    assert len(spec["acceptance_histogram"]) == 4
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]


def test_prompt_logprobs_have_one_entry_per_prompt_token(live: Live) -> None:
    entries = complete(live, [5, 9, 40], prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == 3
    row = log_softmax(table_row(9))
    assert entries[2]["40"]["logprob"] == pytest.approx(row[40])
    assert entries[2]["40"]["decoded_token"] == live.service.table.text_of(40)
    assert entries[2]["40"]["rank"] == 1 + int((row > row[40]).sum())
    assert len(entries[2]) in (2, 3)


def test_tokens_can_be_written_as_ids(live: Live) -> None:
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = complete(live, "say:a|", **fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == f"token_id:{ids_of(live, 'a')[0]}"
    assert all(key.startswith("token_id:") for top in logprobs["top_logprobs"] for key in top)


def test_alternatives_without_text_do_not_collide(live: Live) -> None:
    """Head rows beyond the tokenizer's ids have no text; each keeps an entry of its own."""
    fields = {"logprobs": 20, "logprob_token_ids": list(range(290, VOCAB_SIZE))}
    top = complete(live, "say:a|", **fields)["choices"][0]["logprobs"]["top_logprobs"][0]
    row = log_softmax(table_row(ids_of(live, "|")[0]))
    best = set(row.argsort()[::-1][:20].tolist()) | set(range(290, VOCAB_SIZE))
    assert len(top) == len(best | {ids_of(live, "a")[0]})


def test_a_request_that_fails_while_it_runs_is_a_500_with_the_reason(live: Live) -> None:
    reply = live.post("/v1/completions", {"prompt": "fail:", "max_tokens": 9})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "a row was NaN" in reply.json()["error"]["message"]


def test_response_format_reaches_the_engine_as_a_grammar(live: Live) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    complete(live, "say:a|", response_format=form)
    grammar = live.engine.submitted[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert grammar.text.index('"b"') < grammar.text.index('"a"')
    complete(live, "say:a|", response_format={"type": "text"})
    assert live.engine.submitted[-1].params.grammar is None
