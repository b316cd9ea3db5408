"""Limits of requests: each bad field is named, all of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from truespec.params import Grammar, LogprobParams, SamplingParams, choice_seed
from truespec.tokenizer.errors import BadRequest
from truespec.tokenizer.limits import EngineLimits
from truespec.tokenizer.prepare import bad_words_ids, prepare, rest_of_context

LIMITS = EngineLimits(vocab_size=50, context_length=40, max_total_tokens=30)
PARAMS = SamplingParams(max_tokens=4)


def problems_of(params: SamplingParams, prompt_ids: list[int] | None = None) -> list[str]:
    with pytest.raises(BadRequest) as caught:
        prepare("r", [1, 2, 3] if prompt_ids is None else prompt_ids, params, LIMITS)
    return [problem.param for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 28}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"bad_words_ids": ((1, 50),)}, "bad_words"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (50,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (4,), "bad_words_ids": ((4,), (5, 6))}, "allowed_token_ids"),
        ({"logprobs": LogprobParams(top_k=21, prompt_top_k=21)}, "logprobs"),
        ({"stop": ("a",) * 33}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop_regex": ("(",)}, "stop_regex"),
        ({"stop_regex": ("a*",)}, "stop_regex"),
        ({"stop_regex": ("ab+",)}, "stop_regex"),
        ({"stop_regex": ("a(?=b)",)}, "stop_regex"),
        ({"logprobs": LogprobParams(top_k=21)}, "logprobs"),
        ({"logprobs": LogprobParams(prompt_top_k=-1)}, "prompt_logprobs"),
        ({"logprobs": LogprobParams(start=4)}, "logprob_start_len"),
        ({"logprobs": LogprobParams(start=-2)}, "logprob_start_len"),
        ({"logprobs": LogprobParams(token_ids=(50,))}, "logprob_token_ids"),
        ({"logprobs": LogprobParams(modes=("raw", "raw"))}, "logprobs_mode"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    assert problems_of(replace(PARAMS, **changes)) == [param]


@pytest.mark.parametrize("ids", [[], [50], [-1], [2**40], [1] * 30])
def test_a_bad_prompt_is_refused_by_name(ids: list[int]) -> None:
    assert problems_of(PARAMS, ids) == ["prompt"]


def test_all_problems_are_listed() -> None:
    params = replace(PARAMS, max_tokens=99, stop=("",), stop_token_ids=(77,), seed=-5)
    assert problems_of(params) == ["max_tokens", "stop_token_ids", "stop", "seed"]


@pytest.mark.parametrize("start", [-1, 0, 3])
def test_bounds_themselves_are_accepted(start: int) -> None:
    params = replace(PARAMS, max_tokens=27, logprobs=LogprobParams(top_k=20, start=start))
    assert prepare("r", [0, 49, 1], params, LIMITS).prompt_ids == [0, 49, 1]


def test_choice_0_keeps_the_seed_and_the_others_mix_in_their_number() -> None:
    seeds = [
        prepare("r", [1], replace(PARAMS, seed=7), LIMITS, choice=i).params.seed for i in range(3)
    ]
    assert seeds == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert len(set(seeds)) == 3


def test_unseeded_requests_get_different_seeds_below_2_53() -> None:
    seeds = {prepare("r", [1], PARAMS, LIMITS).params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed < 2**53 for seed in seeds)


def test_a_grammar_that_does_not_compile_is_refused_with_its_reason() -> None:
    params = replace(PARAMS, grammar=Grammar("regex", "("))
    with pytest.raises(BadRequest, match="unclosed group") as caught:
        prepare("r", [1], params, LIMITS, grammar_error=lambda _: "unclosed group")
    assert caught.value.param == "structured_outputs"


def test_rest_of_context_counts_the_smaller_of_context_and_cache() -> None:
    assert rest_of_context(10, LIMITS) == 20
    assert rest_of_context(35, LIMITS) == 1


class Letters:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]


def test_bad_words_are_banned_alone_and_after_a_space() -> None:
    assert bad_words_ids(["hi"], Letters()) == ((104, 105), (32, 104, 105))


def test_an_empty_bad_word_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        bad_words_ids(["a", " "], Letters())
    assert caught.value.param == "bad_words"
