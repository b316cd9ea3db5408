"""Coupled verification against a walk by hand: chains, trees, bad rows, and plain decoding."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from row_kernels import row_kernels
from truespec.kernels.rows import has_numba
from truespec.layers.logits_process import RowEdits, edit_logits, path_edits, request_edits
from truespec.layers.sampler import (
    SampledRows,
    SamplingRows,
    sample,
    sample_draft,
    sampling_rows,
)
from truespec.params import SamplingParams
from truespec.speculative.contract import Draft, Verdict
from truespec.speculative.verify import verify


def _sampled(token_ids: list[int], failed: list[bool] | None = None) -> SampledRows:
    n = len(token_ids)
    return SampledRows(
        token_ids=torch.tensor(token_ids),
        failed=torch.tensor(failed or [False] * n),
        keep_threshold=torch.full((n,), -math.inf),
        tie_id=torch.full((n,), -1),
    )


def _draft(token_ids: list[int], parents: list[int], cu_rows: list[int]) -> Draft:
    return Draft(
        token_ids=torch.tensor(token_ids),
        parents=torch.tensor(parents),
        cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
        logprobs=torch.zeros(len(token_ids)),
    )


def _chain(draft_ids: list[int], root: int = 0) -> Draft:
    n = len(draft_ids) + 1
    return _draft([root, *draft_ids], list(range(-1, n - 1)), [0, n])


def _emitted(verdict: Verdict, request: int = 0) -> tuple[list[int], list[int]]:
    n = int(verdict.num_tokens[request])
    assert verdict.token_ids[request, n:].eq(-1).all()
    assert verdict.row_index[request, n:].eq(-1).all()
    return verdict.token_ids[request, :n].tolist(), verdict.row_index[request, :n].tolist()


def _greedy(num_rows: int) -> SamplingRows:
    positions = torch.arange(num_rows)
    return sampling_rows([SamplingParams(temperature=0, seed=0)], [num_rows], positions)


R0, R1, R2 = [0.0, 2, 1, 0], [3.0, 0, 1, 0], [0.0, 0, 0, 5]


def test_b01_correction_comes_from_the_row_that_refused_the_draft() -> None:
    sampled = sample(torch.tensor([R0, R1, R2]), _greedy(3), 4)
    assert _emitted(verify(_chain([1, 2]), sampled)) == ([1, 0], [0, 1])


def test_b02_bonus_comes_from_the_last_row() -> None:
    sampled = sample(torch.tensor([R0, R1, R2]), _greedy(3), 4)
    assert _emitted(verify(_chain([1, 0]), sampled)) == ([1, 0, 3], [0, 1, 2])


def test_b06_a_single_row_is_plain_decoding() -> None:
    sampled = sample(torch.tensor([[1.0, 0.0]]), _greedy(1), 2)
    assert _emitted(verify(_chain([]), sampled)) == ([0], [0])


def _walk(
    tokens: list[int],
    parents: list[int],
    cu_rows: list[int],
    sampled: list[int],
    failed: list[bool],
) -> list[tuple[list[int], list[int], bool]]:
    """The definition, one row at a time."""
    answers = []
    for begin, end in pairwise(cu_rows):
        row, emitted, rows = begin, [], []
        while not failed[row]:
            emitted.append(sampled[row])
            rows.append(row)
            right = [
                c for c in range(begin, end) if parents[c] == row and tokens[c] == sampled[row]
            ]
            if not right:
                break
            row = right[0]
        answers.append((emitted, rows, failed[row]))
    return answers


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), batch_size=st.integers(1, 4), bushiness=st.integers(1, 4))
def test_random_trees_equal_a_walk_by_hand(seed: int, batch_size: int, bushiness: int) -> None:
    rng = random.Random(seed)
    tokens, parents, cu_rows = [], [], [0]
    for _ in range(batch_size):
        base = len(tokens)
        for i in range(rng.randint(1, 9)):
            tokens.append(rng.randint(0, 1))  # two tokens, so that equal siblings are common
            parents.append(-1 if i == 0 else base + rng.randint(max(0, i - bushiness), i - 1))
        cu_rows.append(len(tokens))
    failed = [rng.random() < 0.08 for _ in tokens]
    choices = [-1 if f else rng.randint(0, 1) for f in failed]
    expected = _walk(tokens, parents, cu_rows, choices, failed)
    for kernels in ("torch", "numba") if has_numba() else ("torch",):
        with row_kernels(kernels):
            verdict = verify(_draft(tokens, parents, cu_rows), _sampled(choices, failed))
        for request, (emitted, rows, has_failed) in enumerate(expected):
            assert _emitted(verdict, request) == (emitted, rows)
            assert bool(verdict.failed[request]) == has_failed


def test_of_equal_siblings_the_lowest_row_goes_on() -> None:
    draft = _draft([9, 5, 5, 7, 8], [-1, 0, 0, 1, 2], [0, 5])
    assert _emitted(verify(draft, _sampled([5, 7, 8, 1, 2]))) == ([5, 7, 1], [0, 1, 3])


def test_b25_a_failed_row_counts_only_on_the_path_and_after_the_tokens_before_it() -> None:
    # Request 0 fails at its second row, request 1 has a bad row off its path, request 2 at once.
    draft = _draft([0, 1, 0, 2, 0, 1], [-1, 0, -1, 2, -1, 4], [0, 2, 4, 6])
    sampled = _sampled([1, -1, 3, -1, -1, 5], [False, True, False, True, True, False])
    verdict = verify(draft, sampled)
    assert verdict.failed.tolist() == [True, False, True]
    assert [_emitted(verdict, i) for i in range(3)] == [([1], [0]), ([3], [2]), ([], [])]


def test_a_given_bound_of_rows_is_the_width_of_the_verdict() -> None:
    verdict = verify(_chain([1, 2]), _sampled([1, 2, 3]), max_rows=5)
    assert verdict.token_ids.tolist() == [[1, 2, 3, -1, -1]]
    assert verdict.num_tokens.dtype == torch.int32


class _Model:
    """A toy target: logits depend on the last two tokens and the position."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.table = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * 2

    def logits(self, history: list[int]) -> Tensor:
        return self.table[history[-2], history[-1]] + 0.1 * (len(history) % 3)


def _choose(
    model: _Model,
    params: SamplingParams,
    prompt: list[int],
    outputs: list[int],
    paths: list[list[int]],
    bitmasks: list[Tensor | None] | None = None,
) -> SampledRows:
    """The sampler's choice after each path of drafts."""
    request = request_edits(params, prompt, outputs, stop_ids=[0])
    masks = bitmasks or [None] * len(paths)
    edits: list[RowEdits | None] = [
        path_edits(request, path, mask) for path, mask in zip(paths, masks, strict=True)
    ]
    logits = torch.stack([model.logits(prompt + outputs + path) for path in paths])
    positions = torch.tensor([len(prompt) + len(outputs) + len(path) for path in paths])
    rows = sampling_rows([params], [len(paths)], positions)
    return sample(edit_logits(logits, edits, model.vocab_size), rows, model.vocab_size)


def _decode_plain(model: _Model, params: SamplingParams, prompt: list[int], n: int) -> list[int]:
    outputs: list[int] = []
    while len(outputs) < n:
        outputs.append(int(_choose(model, params, prompt, outputs, [[]]).token_ids))
    return outputs


def _decode_speculative(
    model: _Model, params: SamplingParams, prompt: list[int], n: int, drafter: str, seed: int
) -> tuple[list[int], list[int]]:
    """Output, and accepted drafts per step."""
    rng = random.Random(seed)
    plain = _decode_plain(model, params, prompt, n + 8)
    outputs: list[int] = []
    accepted: list[int] = []
    while len(outputs) < n:
        rest = plain[len(outputs) :]
        num_drafts = rng.randint(0, 4)
        if drafter == "perfect":
            drafts = rest[:num_drafts]
        elif drafter == "adversarial":
            drafts = [(t + 1) % model.vocab_size for t in rest[:num_drafts]]
        else:
            drafts = [
                t if rng.random() < 0.6 else rng.randrange(model.vocab_size)
                for t in rest[:num_drafts]
            ]
        paths = [drafts[:i] for i in range(len(drafts) + 1)]
        sampled = _choose(model, params, prompt, outputs, paths)
        emitted, _ = _emitted(verify(_chain(drafts, root=prompt[-1]), sampled))
        accepted.append(len(emitted) - 1)
        outputs += emitted
    return outputs[:n], accepted


PARAMS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=0.8, seed=2),
    SamplingParams(temperature=1.5, seed=3, top_k=4, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.0, seed=4, frequency_penalty=0.7, presence_penalty=0.3),
    SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.3, logit_bias=((2, 1.5),)),
    SamplingParams(temperature=1.0, seed=6, min_tokens=6, bad_words_ids=((1, 2), (3,))),
    SamplingParams(temperature=0.9, seed=7, allowed_token_ids=(0, 1, 4, 6)),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"seed{p.seed}")
@pytest.mark.parametrize("drafter", ["perfect", "adversarial", "mixed"])
def test_speculative_output_equals_plain_decoding(params: SamplingParams, drafter: str) -> None:
    model = _Model(7, seed=0)
    prompt = [3, 1, 4]
    output, accepted = _decode_speculative(model, params, prompt, 24, drafter, seed=9)
    assert output == _decode_plain(model, params, prompt, 24)
    # Without these the comparison would prove nothing.
    if drafter == "perfect":
        assert sum(accepted) > 10
    if drafter == "adversarial":
        assert sum(accepted) == 0


@pytest.mark.parametrize("index", [0, 1, 2, 3])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_b10_tokens_up_to_the_end_token_are_plain_wherever_it_falls_in_the_block(
    index: int, is_drafted: bool
) -> None:
    eos = 0
    choices = [5, 6, 7, 4]
    choices[index] = eos
    drafts = choices[:3] if is_drafted else [5, 6, 7]
    emitted, rows = _emitted(verify(_chain(drafts), _sampled(choices)))
    assert emitted[: index + 1] == choices[: index + 1]
    assert rows[: index + 1] == list(range(index + 1))
    # A draft past the end token is emitted too, and cut by whoever commits.
    assert len(emitted) == (4 if is_drafted else index + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b20_a_banned_favourite_is_emitted_by_no_row(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11, logit_bias=((2, -100.0),))
    request = request_edits(params, [1, 1], [])
    logits = torch.tensor([[1.0, 0.5, 9.0]]).expand(4, 3)
    paths = [[], [2], [2, 2], [2, 2, 2]]
    edited = edit_logits(logits, [path_edits(request, path) for path in paths], 3)
    for start in range(40):
        rows = sampling_rows([params], [4], torch.arange(start, start + 4))
        sampled = sample(edited, rows, 3)
        assert 2 not in sampled.token_ids.tolist()
        emitted, _ = _emitted(verify(_chain([2, 2, 2]), sampled))
        assert len(emitted) == 1


def test_b22_penalties_follow_each_rows_own_path() -> None:
    params = SamplingParams(temperature=0.0, seed=0, frequency_penalty=0.5)
    logits = torch.tensor([[1.0, 0.9]]).expand(4, 2)

    def step(outputs: list[int], drafts: list[int]) -> list[int]:
        request = request_edits(params, [0], outputs)
        edits = [path_edits(request, drafts[:i]) for i in range(len(drafts) + 1)]
        edited = edit_logits(logits[: len(edits)], edits, 2)
        return _emitted(verify(_chain(drafts), sample(edited, _greedy(len(edits)), 2)))[0]

    assert step([], [0, 0, 0]) == [0, 1]
    plain: list[int] = []
    for _ in range(5):
        plain += step(plain, [])
    assert plain == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.5])
def test_a_target_that_drafts_for_itself_is_accepted_always(
    temperature: float, filters: dict[str, float]
) -> None:
    """With the same noise, the drafter's argmax over the kept tokens is the sampler's choice."""
    num_steps, num_drafts, vocab_size = 20, 5, 211
    params = SamplingParams(temperature=temperature, seed=21, **filters)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(12)
    for step in range(num_steps):
        logits = torch.randn(num_drafts + 1, vocab_size, generator=generator) * 3
        rows = sampling_rows([params], [num_drafts + 1], torch.arange(num_drafts + 1) + step)
        sampled = sample(logits, rows, vocab_size)
        ids = torch.arange(vocab_size)
        kept = (logits > sampled.keep_threshold[:, None]) | (
            (logits == sampled.keep_threshold[:, None]) & (ids <= sampled.tie_id[:, None])
        )
        drafts, _ = sample_draft(
            torch.where(kept, logits, -math.inf),
            temperature=rows.temperature,
            seed=rows.seed,
            position=rows.position,
        )
        verdict = verify(_chain(drafts[:-1].tolist()), sampled)
        assert int(verdict.num_tokens) == num_drafts + 1
