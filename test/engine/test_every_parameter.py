"""Every parameter acts on every token alike, drafted or not: against plain Python in float64.

Drafts come from prompt look-up and from an oracle that errs, so that first tokens, verify rows,
corrections and bonus tokens all occur.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Job, Result, engine_config, make_engine, make_prompts, plain, total
from oracle import erring, oracle_engine, perfect
from reference import greedy

from tiny import EOS_ID
from truespec.params import SamplingParams

FAMILY = "llama"
PROMPTS = make_prompts(4, seed=11)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, seed=0)
OFTEN_EOS = ((EOS_ID, 3.0),)
CASES: dict[str, dict[str, object]] = {
    "nothing": {},
    "frequency_penalty": {"frequency_penalty": 1.4},
    "a negative frequency_penalty": {"frequency_penalty": -0.9},
    "presence_penalty": {"presence_penalty": 1.9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "a repetition_penalty below 1": {"repetition_penalty": 0.6},
    "all penalties": {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
    },
    "logit_bias": {"logit_bias": ((5, 6.0), (9, -100.0), (31, 4.5), (40, -3.0))},
    "allowed_token_ids": {"allowed_token_ids": (4, 7, 11, 19, 23, 31)},
    "bad_words": {"bad_words_ids": ((30,), (25, 6), (26, 39, 11), (1,), (40, 33))},
    "ignore_eos": {"logit_bias": OFTEN_EOS, "ignore_eos": True},
    "eos": {"logit_bias": ((EOS_ID, 0.5),)},
    "stop_token_ids": {"stop_token_ids": (28, 33, 11)},
    "stop_token_ids with ignore_eos": {
        "stop_token_ids": (11, 28),
        "ignore_eos": True,
        "logit_bias": OFTEN_EOS,
    },
    "min_tokens": {"min_tokens": 6, "logit_bias": OFTEN_EOS, "stop_token_ids": (28, 10)},
    "min_tokens with ignore_eos": {
        "min_tokens": 6,
        "logit_bias": OFTEN_EOS,
        "ignore_eos": True,
        "stop_token_ids": (10, 25),
    },
    "max_tokens": {"max_tokens": 5},
    "everything": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": (*OFTEN_EOS, (22, 2.0)),
        "bad_words_ids": ((30,), (22, 22), (4, 41)),
        "min_tokens": 7,
        "allowed_token_ids": (*range(1, 48, 2), EOS_ID, 22, 4),
    },
}


def jobs_of(fields: dict[str, object]) -> list[Job]:
    return [
        Job(prompt, replace(GREEDY, seed=index, **fields))  # type: ignore[arg-type]
        for index, prompt in enumerate(PROMPTS)
    ]


def ids(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {
        name: [greedy(FAMILY, job.prompt_ids, job.params) for job in jobs_of(fields)]
        for name, fields in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_does_what_it_says_in_plain_decoding_and_in_drafts(
    name: str, expected: dict[str, list[list[int]]]
) -> None:
    jobs = jobs_of(CASES[name])
    assert ids([plain(FAMILY, job.prompt_ids, job.params) for job in jobs]) == expected[name]
    for rule, num_drafts, width in (
        (perfect, 4, 1),
        (erring(0.3, 5), 3, 1),
        (erring(0.2, 6), 6, 2),
    ):
        engine = oracle_engine(FAMILY, jobs, rule, num_drafts=num_drafts, width=width)
        results = engine.run(jobs)
        assert ids(results) == expected[name]
        assert total(results).num_accepted > 0
    assert ids(make_engine(FAMILY, engine_config("NGRAM")).run(jobs)) == expected[name]


@pytest.mark.parametrize("name", [name for name in CASES if name != "nothing"])
def test_a_parameter_of_these_cases_changes_some_output(
    name: str, expected: dict[str, list[list[int]]]
) -> None:
    assert expected[name] != expected["nothing"]


def test_the_stop_id_ends_the_output_at_every_place_of_a_draft() -> None:
    """B10: an end inside an accepted block, whichever token of it is the last."""
    whole = plain(FAMILY, PROMPTS[0], replace(GREEDY, ignore_eos=True)).token_ids
    for place in range(1, 9):
        stop_id = whole[place]
        first = whole.index(stop_id)
        params = replace(GREEDY, stop_token_ids=(stop_id,), ignore_eos=True)
        job = Job(PROMPTS[0], params)

        def beyond(right: list[int], at: int) -> list[int]:
            return whole[at : at + 6]  # the oracle does not know of the stop

        (result,) = oracle_engine(FAMILY, [job], beyond, num_drafts=6).run([job])
        assert result.token_ids == whole[: first + 1]
        assert result.finish == ("stop", stop_id, "")
        assert result.facts == plain(FAMILY, PROMPTS[0], params).facts


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_penalties_count_what_was_output_before_a_retraction(num_drafts: int) -> None:
    fields = CASES["all penalties"] | {"max_tokens": 40, "ignore_eos": True}
    jobs = [replace(job, arrival=index) for index, job in enumerate(jobs_of(fields))]
    config = engine_config(pool=128, prefix=False)
    engine = oracle_engine(FAMILY, jobs, perfect, num_drafts=num_drafts, config=config)
    results = engine.run(jobs)
    assert ids(results) == [greedy(FAMILY, job.prompt_ids, job.params) for job in jobs]
    assert engine.num_retractions > 0


@pytest.mark.parametrize(
    ("fields", "most"), [({"num_draft_tokens": 1}, 1), ({"speculative": False}, 0)]
)
def test_a_request_limits_its_own_drafts(fields: dict[str, object], most: int) -> None:
    limited = replace(GREEDY, seed=0, **fields)  # type: ignore[arg-type]
    jobs = [Job(PROMPTS[0], limited), Job(PROMPTS[1], replace(GREEDY, seed=1))]
    results = oracle_engine(FAMILY, jobs, perfect, num_drafts=4).run(jobs)
    drafts = [{record.num_drafts for record in result.records} for result in results]
    assert max(drafts[0]) == most
    assert max(drafts[1]) == 4
    assert results[0].token_ids == plain(FAMILY, PROMPTS[0], replace(GREEDY, seed=0)).token_ids
