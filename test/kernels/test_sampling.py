"""The sampler: exact filters, the exact law, ties, bad rows, and independence of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from row_kernels import row_kernels
from truespec.kernels import noise
from truespec.kernels.rows import has_numba
from truespec.layers.sampler import (
    SampledRows,
    SamplingRows,
    sample,
    sample_draft,
    sampling_rows,
    top_k_draft,
)
from truespec.params import SamplingParams

INF = math.inf
KERNELS = [
    "torch",
    pytest.param("numba", marks=pytest.mark.skipif(not has_numba(), reason="no numba")),
]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with row_kernels(request.param):
        yield str(request.param)


def _rows(
    num_rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64),
        log_min_p=torch.full((num_rows,), min_p, dtype=torch.float64).log(),
        seed=torch.full((num_rows,), seed),
        position=torch.arange(num_rows),
    )


def _kept(logits: Tensor, sampled: SampledRows, row: int) -> list[int]:
    x, threshold, tie = logits[row], sampled.keep_threshold[row], int(sampled.tie_id[row])
    ids = torch.arange(len(x))
    is_kept = (x > threshold) | ((x == threshold) & (ids <= tie))
    return ids[is_kept & (x > -INF)].tolist()


def _kept_by_sorting(
    x: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """The filters' definition, in float64, by one full sort."""
    if temperature == 0:
        return [i for i, v in enumerate(x) if v > -INF]
    order = sorted((i for i in range(len(x)) if x[i] > -INF), key=lambda i: (-x[i], i))
    if top_k > 0:
        order = order[:top_k]
    weight = {i: math.exp((x[i] - x[order[0]]) / temperature) for i in order}
    if top_p < 1:
        total, mass, count = sum(weight.values()), 0.0, 0
        while count == 0 or mass < top_p * total * (1 - 1e-9):
            mass += weight[order[count]]
            count += 1
        order = order[:count]
    return sorted(i for i in order if weight[i] >= min_p * (1 - 1e-6))


FILTERS = [
    (temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.3, 1.0, 5.0), (0, 1, 5, 300), (1.0, 0.9, 0.3, 0.0), (0.0, 0.05, 1.0)
    )
]


@pytest.mark.parametrize("vocab_size", [1, 7, 127, 129, 1823])
def test_filters_keep_what_a_float64_sort_keeps(kernels: str, vocab_size: int) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[1] = logits[1].round()  # ties
    logits[1, 1::5] = -INF
    for filters in FILTERS:
        sampled = sample(logits, _rows(2, *filters), vocab_size)
        for row in range(2):
            expected = _kept_by_sorting(logits[row].tolist(), *filters)
            assert _kept(logits, sampled, row) == expected, filters
            assert int(sampled.token_ids[row]) in expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.1, [0]), (0.3, [0, 1, 2]), (0.31, [0, 1, 2, 3]), (0.5, [0, 1, 2, 3, 4])],
)
def test_top_p_over_ten_equal_tokens_keeps_the_lowest_ids(
    kernels: str, top_p: float, expected: list[int]
) -> None:
    logits = torch.full((1, 10), 1.7)
    sampled = sample(logits, _rows(1, top_p=top_p), 10)
    assert _kept(logits, sampled, 0) == expected


def test_top_k_is_applied_before_top_p(kernels: str) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    sampled = sample(logits, _rows(1, top_k=2, top_p=0.5), 4)
    assert _kept(logits, sampled, 0) == [0]  # 0.4 of 0.7 is more than half; of 1.0 it is not


@settings(max_examples=150, deadline=None)
@given(
    x=st.lists(st.sampled_from([-INF, -3.0, -1.0, -0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=40),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.37, 0.83, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.43]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_reference_and_kernel_agree_on_rows_full_of_ties(
    x: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.tensor([x])
    rows = _rows(1, temperature, top_k, top_p, min_p, seed)
    answers = []
    for name in ("torch", "numba") if has_numba() else ("torch",):
        with row_kernels(name):
            answers.append(sample(logits, rows, len(x)))
    if max(x) == -INF:
        assert all(a.failed.tolist() == [True] and a.token_ids.tolist() == [-1] for a in answers)
        return
    expected = _kept_by_sorting(x, temperature, top_k, top_p, min_p)
    assert all(_kept(logits, a, 0) == expected for a in answers)
    assert len({int(a.token_ids) for a in answers}) == 1


def test_reference_and_kernel_choose_the_same_tokens_of_a_large_vocabulary() -> None:
    if not has_numba():
        pytest.skip("numba is not installed")
    logits = torch.randn(6, 49152, generator=torch.Generator().manual_seed(1)) * 2.5
    for filters in ((0.0,), (1.0,), (3.0,), (1.0, 50, 0.9, 0.02), (1.0, 0, 0.95), (4.0, 3000)):
        answers = []
        for name in ("torch", "numba"):
            with row_kernels(name):
                answers.append(sample(logits, _rows(6, *filters), 49152))
        one, two = answers
        assert torch.equal(one.token_ids, two.token_ids)
        assert torch.equal(one.keep_threshold, two.keep_threshold)
        assert torch.equal(one.tie_id, two.tie_id)


def test_choice_is_the_argmax_of_scaled_logits_plus_noise(kernels: str) -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(2)) * 2
    rows = _rows(64, temperature=0.7, seed=5)
    gumbel = noise.gumbel(rows.seed, rows.position, torch.arange(300)).to(torch.float64)
    expected = (logits.to(torch.float64) / 0.7 + gumbel).argmax(-1)
    assert torch.equal(sample(logits, rows, 300).token_ids, expected)


def _law_by_enumeration(scaled: list[float]) -> list[float]:
    """P(token wins) when the hashes of all tokens run over all their values independently.

    Counts, for every 256th hash of token i, the hashes of each other token that lose to it, in the
    sampler's own fp32 arithmetic and with its rule for ties.
    """
    u = torch.arange(1, 2**24, dtype=torch.int64).to(torch.float32) * 2.0**-24
    gumbel = -noise.log_fixed(-noise.log_fixed(u))
    assert (gumbel.diff() >= 0).all()  # so that losers can be counted by bisection
    law = []
    for i, own in enumerate(scaled):
        score = gumbel[128::256] + own
        wins = torch.ones_like(score, dtype=torch.float64)
        for j, other in enumerate(scaled):
            if j != i:  # an equal score of a higher id loses, of a lower id wins
                losers = torch.searchsorted(gumbel + other, score, right=j > i)
                wins *= losers / len(gumbel)
        law.append(wins.mean().item())
    return law


@pytest.mark.parametrize("scaled", [[0.0, -1.0, -2.0], [0.0, 0.0, 0.0], [0.0, -6.0, -0.5]])
def test_the_law_of_three_tokens_is_softmax_by_enumeration_of_the_hashes(
    scaled: list[float],
) -> None:
    expected = torch.tensor(scaled, dtype=torch.float64).softmax(0).tolist()
    law = _law_by_enumeration(scaled)
    assert law == pytest.approx(expected, abs=2e-5)
    assert sum(law) == pytest.approx(1.0, abs=2e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.8)]
)
def test_frequencies_follow_the_filtered_softmax_to_chi_square(
    kernels: str, temperature: float, top_k: int, top_p: float
) -> None:
    num_draws = 20000
    x = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0])
    rows = _rows(num_draws, temperature, top_k, top_p, seed=1234)
    tokens = sample(x.expand(num_draws, 5), rows, 5).token_ids
    kept = _kept_by_sorting(x.tolist(), temperature, top_k, top_p, 0.0)
    p = (x[kept].to(torch.float64) / temperature).softmax(0)
    counts = torch.bincount(tokens, minlength=5).to(torch.float64)
    assert counts.sum() == counts[kept].sum()
    chi2 = ((counts[kept] - num_draws * p) ** 2 / (num_draws * p)).sum().item()
    assert chi2 < len(kept) - 1 + 5 * math.sqrt(2 * len(kept))


def test_b23_greedy_rows_ignore_seed_and_neighbours_and_noise_rows_are_as_alone(
    kernels: str,
) -> None:
    logits = torch.randn(1, 501, generator=torch.Generator().manual_seed(3)).expand(3, 501)
    best = int(logits[0].argmax())
    for seed in range(50):
        rows = _rows(3, seed=seed)
        rows.temperature[:] = torch.tensor([0.0, 1.0, 1e-6])
        mixed = sample(logits, rows, 501).token_ids.tolist()
        alone = SamplingRows(
            rows.temperature[1:2],
            rows.top_k[1:2],
            rows.top_p[1:2],
            rows.log_min_p[1:2],
            rows.seed[1:2],
            rows.position[1:2],
        )
        assert mixed[0] == best
        assert mixed[1] == int(sample(logits[:1], alone, 501).token_ids)
        assert mixed[2] == best


def test_x05_a_seed_repeats_alone_and_in_a_batch_and_seeds_differ(kernels: str) -> None:
    logits = torch.zeros(4, 4096)
    params = [SamplingParams(seed=s) for s in (7, 8, 7, 2**64 - 1)]
    positions = torch.tensor([5, 5, 5, 5])
    batch = sample(logits, sampling_rows(params, [1] * 4, positions), 4096).token_ids.tolist()
    alone = sample(logits[:1], sampling_rows(params[:1], [1], positions[:1]), 4096).token_ids
    assert batch[0] == batch[2] == int(alone)
    assert len(set(batch)) == 3


def test_rows_of_a_request_share_its_parameters_at_their_own_positions(kernels: str) -> None:
    params = [SamplingParams(seed=3, temperature=0.5, top_k=4), SamplingParams(seed=-1 % 2**64)]
    rows = sampling_rows(params, [2, 1], torch.tensor([9, 10, 4]))
    assert rows.temperature.tolist() == [0.5, 0.5, 1.0]
    assert rows.top_k.tolist() == [4, 4, 0]
    assert rows.seed.tolist() == [3, 3, -1]
    assert rows.position.tolist() == [9, 10, 4]


def test_b25_bad_rows_fail_alone_and_name_no_token(kernels: str) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4))
    clean = logits.clone()
    logits[0, 299] = math.nan
    logits[1, 0] = -math.nan
    logits[2] = -INF
    logits[3, 17] = INF
    for filters in ((0.0,), (1.0,), (1.0, 5, 0.5, 0.1)):
        sampled = sample(logits, _rows(6, *filters), 300)
        assert sampled.failed.tolist() == [True] * 4 + [False] * 2
        assert sampled.token_ids[:4].tolist() == [-1] * 4
        expected = sample(clean, _rows(6, *filters), 300).token_ids[4:]
        assert torch.equal(sampled.token_ids[4:], expected)


def test_padding_columns_are_never_read(kernels: str) -> None:
    logits = torch.randn(3, 140, generator=torch.Generator().manual_seed(5))
    padded = torch.cat((logits, torch.full((3, 4), math.nan)), dim=1)
    for filters in ((0.0,), (1.0,), (1.0, 5, 0.5)):
        one, two = (sample(x, _rows(3, *filters), 140) for x in (logits, padded))
        assert torch.equal(one.token_ids, two.token_ids)
        assert not two.failed.any()


def test_ties_go_to_the_lowest_id_and_signed_zeros_are_equal(kernels: str) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0], [3.0, 3.0, 3.0, 2.0]])
    assert sample(logits, _rows(2, 0.0), 4).token_ids.tolist() == [1, 0]
    top_2 = sample(logits, _rows(2, 1.0, top_k=2), 4)
    assert [_kept(logits, top_2, row) for row in range(2)] == [[1, 2], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(kernels: str, dtype: torch.dtype) -> None:
    logits = torch.randn(20, 515, generator=torch.Generator().manual_seed(6)).to(dtype)
    for filters in ((0.0,), (1.0, 7)):
        one, two = (sample(x, _rows(20, *filters), 515) for x in (logits, logits.float()))
        assert torch.equal(one.token_ids, two.token_ids)


def test_an_empty_batch_gives_empty_results(kernels: str) -> None:
    assert sample(torch.empty(0, 9), _rows(0), 9).token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_target_as_its_own_drafter_is_always_right_without_filters(
    kernels: str, temperature: float
) -> None:
    logits = torch.randn(200, 777, generator=torch.Generator().manual_seed(7)) * 2
    rows = _rows(200, temperature, seed=99)
    drafts, _ = sample_draft(
        logits, temperature=rows.temperature, seed=rows.seed, position=rows.position
    )
    assert torch.equal(drafts, sample(logits, rows, 777).token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_are_target_ids_with_the_drafters_own_logprob(
    kernels: str, temperature: float
) -> None:
    logits = torch.randn(50, 400, generator=torch.Generator().manual_seed(8))
    target_ids = torch.randperm(9999, generator=torch.Generator().manual_seed(9))[:400]
    rows = _rows(50, temperature, seed=4)
    drafts, logprobs = sample_draft(
        logits,
        temperature=rows.temperature,
        seed=rows.seed,
        position=rows.position,
        target_ids=target_ids,
    )
    scaled = logits.to(torch.float64) / (temperature or 1.0)
    gumbel = noise.gumbel(rows.seed, rows.position, target_ids).to(torch.float64)
    columns = (scaled + (gumbel if temperature else 0.0)).argmax(-1)
    assert torch.equal(drafts, target_ids[columns])
    expected = scaled.log_softmax(-1).gather(-1, columns[:, None])[:, 0]
    assert (logprobs - expected).abs().max().item() < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tree_children_are_the_best_of_the_perturbed_logits(
    kernels: str, temperature: float
) -> None:
    logits = torch.randn(20, 400, generator=torch.Generator().manual_seed(10))
    target_ids = torch.arange(400) * 3
    rows = _rows(20, temperature, seed=4)
    ids, scores = top_k_draft(
        logits,
        7,
        temperature=rows.temperature,
        seed=rows.seed,
        position=rows.position,
        target_ids=target_ids,
    )
    perturbed = logits.to(torch.float64) / (temperature or 1.0)
    if temperature:
        perturbed += noise.gumbel(rows.seed, rows.position, target_ids)
    best = perturbed.log_softmax(-1).topk(7, -1)
    assert torch.equal(ids, target_ids[best.indices])
    assert (scores - best.values).abs().max().item() < 1e-5


def test_tree_children_of_equal_score_come_in_order_of_their_ids(kernels: str) -> None:
    rows = _rows(1, 0.0)
    ids, _ = top_k_draft(
        torch.zeros(1, 300), 5, temperature=rows.temperature, seed=rows.seed, position=rows.position
    )
    assert ids.tolist() == [[0, 1, 2, 3, 4]]


def test_a_draft_row_with_nan_still_names_a_token(kernels: str) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0], [0.0, 1.0, 2.0]])
    rows = _rows(2, 0.0)
    keys = {"temperature": rows.temperature, "seed": rows.seed, "position": rows.position}
    ids, logprobs = sample_draft(logits, **keys)
    assert ids.tolist() == [0, 2]
    assert logprobs[0].item() == -INF
    ids, scores = top_k_draft(logits, 2, **keys)
    assert ids.tolist() == [[0, 1], [2, 1]]
    assert scores[0].tolist() == [-INF, -INF]
