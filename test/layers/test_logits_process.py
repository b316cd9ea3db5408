"""Logits edits against the definitions, row by row along a path of drafts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truespec.layers.logits_process import (
    RowEdits,
    edit_logits,
    path_edits,
    request_edits,
)
from truespec.layers.sampler import sample, sampling_rows
from truespec.params import Grammar, SamplingParams

INF = math.inf


def _edit(
    row: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    path: list[int] | None = None,
    stop_ids: tuple[int, ...] = (),
    bitmask: list[int] | None = None,
) -> list[float]:
    request = request_edits(params, prompt, output, stop_ids)
    mask = None if bitmask is None else torch.tensor(bitmask, dtype=torch.int32)
    edits = [path_edits(request, path or [], mask)]
    return edit_logits(torch.tensor([row]), edits, len(row))[0].tolist()


def test_rows_without_edits_are_free() -> None:
    logits = torch.randn(3, 5)
    request = request_edits(SamplingParams(seed=0, temperature=0.3), [1], [2])
    assert request is None
    assert path_edits(request, [3]) is None
    assert edit_logits(logits, [None, None, None], 5) is logits


def test_the_input_is_not_modified_and_other_rows_stay_as_they_are() -> None:
    logits = torch.randn(3, 7)
    before = logits.clone()
    edits = [None, RowEdits(banned_ids=torch.tensor([2])), None]
    edited = edit_logits(logits, edits, 5)
    assert torch.equal(logits, before)
    assert torch.equal(edited[0], before[0])
    assert torch.equal(edited[2], before[2])
    assert edited[1, 2] == -INF
    assert torch.equal(edited[:, 5:], before[:, 5:])  # padding is not ours


def test_half_precision_rows_are_edited_in_fp32() -> None:
    logits = torch.full((1, 3), 3.0, dtype=torch.bfloat16)
    edits = [RowEdits(bias_ids=torch.tensor([1]), bias=torch.tensor([0.001]))]
    assert edit_logits(logits, edits, 3)[0].tolist() == pytest.approx([3.0, 3.001, 3.0])


def test_repetition_penalty_counts_prompt_output_and_path_once() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    row = [1.0, -1.0, 4.0, 5.0, 0.0]
    assert _edit(row, params, [0], [1, 1], [2]) == [0.5, -2.0, 2.0, 5.0, 0.0]


def test_frequency_and_presence_count_output_and_path_but_not_the_prompt() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    row = [1.0, 1.0, 1.0]
    assert _edit(row, params, [0, 0, 2], [1, 1], [1, 2]) == pytest.approx([1.0, -0.75, 0.25])


def test_penalties_come_before_bias_and_bias_before_masks() -> None:
    params = SamplingParams(
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias=((0, 10.0), (1, 10.0)),
        allowed_token_ids=(0, 2),
    )
    # Token 0: 4 / 2 - 1 + 10; bias first would give (4 + 10) / 2 - 1.
    assert _edit([4.0, 4.0, 4.0], params, [], [0]) == [11.0, -INF, 4.0]


def test_a_bias_given_twice_adds_up() -> None:
    assert _edit([0.0, 0.0], SamplingParams(logit_bias=((1, 2.0), (1, 3.0))), [], []) == [0.0, 5.0]


def test_no_allowed_id_leaves_nothing_and_the_sampler_reports_it() -> None:
    params = SamplingParams(allowed_token_ids=(), seed=0)
    edited = _edit([1.0, 2.0], params, [], [])
    assert edited == [-INF, -INF]
    rows = sampling_rows([params], [1], torch.tensor([0]))
    assert sample(torch.tensor([edited]), rows, 2).failed.tolist() == [True]


@pytest.mark.parametrize(
    ("output", "path", "is_masked"), [([], [], True), ([3], [3], False), ([3], [], True)]
)
def test_stop_ids_are_masked_until_min_tokens_are_out(
    output: list[int], path: list[int], is_masked: bool
) -> None:
    edited = _edit([1.0, 1.0, 1.0, 1.0], SamplingParams(min_tokens=2), [0], output, path, (1, 2))
    expected = -INF if is_masked else 1.0
    assert edited == [1.0, expected, expected, 1.0]


def test_min_tokens_reached_before_the_step_needs_no_edit() -> None:
    assert request_edits(SamplingParams(min_tokens=2), [0], [1, 1], [2]) is None


@pytest.mark.parametrize(
    ("prompt", "output", "path", "banned"),
    [
        ([9], [], [], [5]),
        ([9], [1], [], [5, 2]),
        ([1], [], [], [5, 2]),  # a word may begin in the prompt
        ([9], [1], [2], [5, 3]),
        ([9], [1, 2], [], [5, 3]),
        ([9], [2, 1], [4], [5]),
    ],
)
def test_a_bad_word_loses_its_last_id_when_the_path_holds_the_rest(
    prompt: list[int], output: list[int], path: list[int], banned: list[int]
) -> None:
    params = SamplingParams(bad_words_ids=((5,), (1, 2), (1, 2, 3)))
    edited = _edit([0.0] * 10, params, prompt, output, path)
    assert [i for i, v in enumerate(edited) if v == -INF] == sorted(banned)


def test_a_grammar_mask_allows_the_set_bits_of_its_words() -> None:
    params = SamplingParams(grammar=Grammar("regex", "a"))
    sign_bit = -(2**31)  # bit 31 of the first word
    edited = _edit([0.0] * 40, params, [], [], bitmask=[sign_bit | 0b101, 0b10])
    assert [i for i, v in enumerate(edited) if v == 0.0] == [0, 2, 31, 33]


def test_b20_a_bias_of_minus_100_acts_on_every_row() -> None:
    request = request_edits(SamplingParams(logit_bias=((2, -100.0),)), [0], [])
    logits = torch.tensor([[1.0, 0.0, 9.0]]).expand(3, 3)
    edited = edit_logits(logits, [path_edits(request, [2] * i) for i in range(3)], 3)
    assert edited[:, 2].tolist() == [-91.0] * 3


def test_b22_each_row_has_the_penalty_of_its_own_path() -> None:
    request = request_edits(SamplingParams(frequency_penalty=0.5), [0], [])
    logits = torch.tensor([[1.0, 0.9]]).expand(3, 2)
    edited = edit_logits(logits, [path_edits(request, [0] * i) for i in range(3)], 2)
    assert edited.tolist() == [pytest.approx([1.0 - 0.5 * i, 0.9]) for i in range(3)]


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    output=st.lists(st.integers(0, 5), max_size=6),
    path=st.lists(st.integers(0, 5), max_size=4),
    repetition=st.sampled_from([1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.2]),
    presence=st.sampled_from([0.0, 0.7]),
    min_tokens=st.integers(0, 8),
)
def test_a_verify_row_is_edited_as_plain_decoding_would_at_its_position(
    prompt: list[int],
    output: list[int],
    path: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        min_tokens=min_tokens,
        bad_words_ids=((1, 2), (3, 3, 4)),
        logit_bias=((4, 0.5),),
    )
    row = [0.5, -0.5, 1.0, 2.0, -1.0, 0.0]
    as_verify = _edit(row, params, prompt, output, path, stop_ids=(5,))
    as_plain = _edit(row, params, prompt, output + path, [], stop_ids=(5,))
    assert as_verify == as_plain
    expected = _by_definition(row, params, prompt, output + path)
    assert as_plain == pytest.approx(expected, abs=1e-6)


def _by_definition(
    row: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    values = list(row)
    history = prompt + output
    for token in set(history):
        r = params.repetition_penalty
        values[token] = values[token] / r if values[token] > 0 else values[token] * r
    for token in set(output):
        values[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    for word in params.bad_words_ids:
        if len(history) >= len(word) - 1 and history[len(history) - len(word) + 1 :] == list(
            word[:-1]
        ):
            values[word[-1]] = -INF
    if len(output) < params.min_tokens:
        values[5] = -INF
    return values
