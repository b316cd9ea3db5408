"""Rejection verification: exact by enumeration of coins, then the whole function by frequency."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from truespec.kernels.noise import DOMAIN_DRAFT
from truespec.layers.sampler import SamplingRows, sample, sample_draft
from truespec.speculative.contract import Draft, Verdict
from truespec.speculative.rejection import (
    Coins,
    accepts,
    draw_coins,
    pick,
    residual,
    verify_rejection,
)

Law = dict[tuple[int, ...], float]


def _table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _accept_probability(p_x: float, q_x: float) -> float:
    """Where the decision flips, by bisection on the code's own answer."""

    def passes(coin: float) -> bool:
        values = torch.tensor([p_x, q_x, coin], dtype=torch.float64)
        return bool(accepts(*values.split(1)))

    if not passes(1e-15):
        return 0.0
    if passes(1 - 1e-15):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _normalised(weights: Tensor) -> list[float]:
    return (weights / weights.sum()).tolist()


def _emitted_law(
    p: list[Tensor], q: list[Tensor], prefix_draws: list[list[float]] | None = None
) -> Law:
    """Exact law of what a chain of len(q) drafts emits; p[j], q[j] do not depend on tokens.

    `prefix_draws`: the distribution the drafts are really drawn from, by default q.
    """
    draws = prefix_draws or [row.tolist() for row in q]
    size = len(p[0])
    law: Law = {}
    for drafts in itertools.product(range(size), repeat=len(q)):
        weight = math.prod(draws[j][x] for j, x in enumerate(drafts))
        for j in range(len(q) + 1):
            if j == len(q):
                tail, here = _normalised(p[j]), weight
            else:
                a = _accept_probability(float(p[j][drafts[j]]), float(q[j][drafts[j]]))
                tail, here = _normalised(residual(p[j], q[j])), weight * (1 - a)
                weight *= a
            for token, share in enumerate(tail):
                key = (*drafts[:j], token)
                law[key] = law.get(key, 0.0) + here * share
    return law


def _prefix_law(law: Law, p: list[Tensor], length: int) -> Law:
    """Law of the first `length` tokens, completing short outputs by plain decoding."""
    size = len(p[0])
    total: Law = {}
    for tokens, weight in law.items():
        rest = range(max(0, length - len(tokens)))
        for more in itertools.product(range(size), repeat=len(rest)):
            share = math.prod(float(p[len(tokens) + i][t]) for i, t in enumerate(more))
            key = (*tokens, *more)[:length]
            total[key] = total.get(key, 0.0) + weight * share
    return total


def _random_tables(seed: int, num_rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64) * 2
    return list(x.softmax(-1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_chains_follow_the_target_exactly_by_enumeration(seed: int, num_drafts: int) -> None:
    p, q = _random_tables(seed, 3), _random_tables(100 + seed, num_drafts)
    law = _prefix_law(_emitted_law(p[: num_drafts + 1], q), p, num_drafts + 1)
    for tokens in itertools.product(range(3), repeat=num_drafts + 1):
        expected = math.prod(float(p[j][t]) for j, t in enumerate(tokens))
        assert law[tokens] == pytest.approx(expected, abs=1e-12)


def test_b24_the_worked_example_is_exact() -> None:
    p, q = _table([[0.5, 0.3, 0.2]])[0], _table([[0.2, 0.7, 0.1]])[0]
    accept = [_accept_probability(float(a), float(b)) for a, b in zip(p, q, strict=True)]
    assert accept == pytest.approx([1, 3 / 7, 1])
    assert sum(float(b) * (1 - a) for a, b in zip(accept, q, strict=True)) == pytest.approx(0.4)
    assert _normalised(residual(p, q)) == pytest.approx([0.75, 0, 0.25])
    point_mass = _table([[0.0, 1.0, 0.0]])[0]
    assert _accept_probability(0.3, 1.0) == pytest.approx(0.3)
    assert _normalised(residual(p, point_mass)) == pytest.approx([5 / 7, 0, 2 / 7])
    law = _emitted_law([p, p], [point_mass])
    first = _prefix_law(law, [p, p], 1)
    assert [first[i,] for i in range(3)] == pytest.approx(p.tolist(), abs=1e-12)


def test_drafts_by_argmax_with_a_softmax_q_would_break_the_law() -> None:
    """Drafters' counter-example (a): why q must be what the drafts were drawn from."""
    p, q = _table([[0.7, 0.3]])[0], _table([[0.5, 0.5]])[0]
    wrong = _prefix_law(_emitted_law([p, p], [q], [[1.0, 0.0]]), [p, p], 1)
    assert wrong[0,] == pytest.approx(1.0)
    right = _prefix_law(_emitted_law([p, p], [_table([[1.0, 0.0]])[0]]), [p, p], 1)
    assert right[0,] == pytest.approx(0.7)


def test_a_filter_on_one_side_only_would_break_the_law() -> None:
    """Counter-example (e): p of the test must be the filtered p."""
    p, filtered = _table([[0.6, 0.3, 0.1]])[0], _table([[2 / 3, 1 / 3, 0.0]])[0]
    q = _table([[0.1, 0.1, 0.8]])[0]
    right = _prefix_law(_emitted_law([filtered, filtered], [q]), [filtered, filtered], 1)
    assert right.get((2,), 0.0) == 0.0
    assert right[0,] == pytest.approx(2 / 3)
    wrong = _prefix_law(_emitted_law([p, filtered], [q]), [p, filtered], 1)
    assert wrong[2,] == pytest.approx(0.1)


def test_residual_without_mass_falls_back_to_the_target() -> None:
    p = _table([[0.25, 0.75]])[0]
    assert residual(p, p).tolist() == p.tolist()
    assert residual(p, torch.full_like(p, math.nan)).tolist() == p.tolist()


def test_b25_a_nan_or_zero_q_rejects() -> None:
    p_x = torch.full((3,), 0.5, dtype=torch.float64)
    q_x = torch.tensor([math.nan, 0.0, 0.5], dtype=torch.float64)
    coins = torch.full((3,), 1e-9, dtype=torch.float64)
    assert accepts(p_x, q_x, coins).tolist() == [False, False, True]


def test_pick_names_the_token_of_the_coins_share_and_no_impossible_one() -> None:
    weights = torch.tensor([0.0, 0.2, 0.0, 0.6, 0.0], dtype=torch.float64)
    coins = [0.0, 0.2499, 0.2501, 0.99999, 1.0]
    picked = [int(pick(weights, torch.tensor(c, dtype=torch.float64))) for c in coins]
    assert picked == [1, 1, 3, 3, 3]


def _rows(num_rows: int, temperature: float, seed: int, top_k: int = 0) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.ones(num_rows, dtype=torch.float64),
        log_min_p=torch.full((num_rows,), -torch.inf, dtype=torch.float64),
        seed=torch.full((num_rows,), seed),
        position=torch.arange(num_rows),
    )


def _chains(lengths: list[int], token_ids: Tensor, logits: Tensor) -> Draft:
    cu_rows = torch.tensor([0, *lengths]).cumsum(0)
    num_rows = int(cu_rows[-1])
    parents = torch.arange(num_rows) - 1
    parents[cu_rows[:-1]] = -1
    return Draft(
        token_ids=token_ids,
        parents=parents,
        cu_rows=cu_rows.to(torch.int32),
        logprobs=torch.zeros(num_rows),
        logits=logits,
    )


def _draw_and_verify(
    lengths: list[int], p: Tensor, q: Tensor, rows: SamplingRows
) -> tuple[Draft, Verdict]:
    """Drafts drawn from q (logits of draft row r at r) at the position their parent chooses for."""
    positions = torch.cat((rows.position[:1], rows.position[:-1]))
    seeds = torch.cat((rows.seed[:1], rows.seed[:-1]))
    drafts, _ = sample_draft(
        q, temperature=rows.temperature, seed=seeds, position=positions, domain=DOMAIN_DRAFT
    )
    draft = _chains(lengths, drafts, q)
    sampled = sample(p, rows, p.shape[1])
    coins = draw_coins(rows)
    verdict = verify_rejection(draft, p, sampled, rows.temperature, coins, vocab_size=p.shape[1])
    return draft, verdict


def _chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("top_k", [0, 2])
def test_b24_twenty_thousand_draws_follow_the_target_to_chi_square(top_k: int) -> None:
    num_requests = 10000
    lengths = [2 + i % 2 for i in range(num_requests)]  # one and two drafts, mixed
    num_rows = sum(lengths)
    p = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(num_rows, 3).contiguous()
    q = torch.tensor([[0.2, 0.7, 0.1]]).log().expand(num_rows, 3).contiguous()
    rows = _rows(num_rows, 1.0, seed=77, top_k=top_k)
    _, verdict = _draw_and_verify(lengths, p, q, rows)
    law = torch.tensor([0.5, 0.3, 0.2] if top_k == 0 else [0.625, 0.375, 0.0])
    for place in (0, 1):
        tokens = verdict.token_ids[:, place]
        tokens = tokens[tokens >= 0]
        counts = torch.bincount(tokens, minlength=3).to(torch.float64)
        assert counts[law == 0].sum() == 0
        expected = law[law > 0] * len(tokens)
        assert _chi_square(counts[law > 0], expected) < 15
    # The acceptance rate of the first draft is sum min(p, q) = 0.6, or 0.575 with the filter.
    rate = (verdict.num_tokens > 1).to(torch.float64).mean().item()
    assert rate == pytest.approx(0.6 if top_k == 0 else 0.575, abs=0.02)


def test_the_next_token_does_not_depend_on_the_first() -> None:
    """Streams for drafts, coins and residuals are independent: token pairs factorise."""
    num_requests = 8000
    lengths = [3] * num_requests
    p = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3 * num_requests, 3).contiguous()
    q = torch.tensor([[0.3, 0.4, 0.3]]).log().expand(3 * num_requests, 3).contiguous()
    _, verdict = _draw_and_verify(lengths, p, q, _rows(3 * num_requests, 1.0, seed=5))
    both = verdict.token_ids[verdict.num_tokens >= 2][:, :2]
    accepted_law = torch.tensor([0.3, 0.3, 0.2]) / 0.8  # first token given that it was accepted
    counts = torch.bincount(both[:, 0] * 3 + both[:, 1], minlength=9).to(torch.float64)
    expected = torch.outer(accepted_law, torch.tensor([0.5, 0.3, 0.2])).view(-1) * len(both)
    assert _chi_square(counts, expected) < 8 + 5 * 4


def test_greedy_requests_are_compared_with_the_argmax_in_a_mixed_batch() -> None:
    p = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]]).repeat(2, 1)
    q = torch.zeros(4, 3)
    rows = _rows(4, 1.0, seed=3)
    rows.temperature[:2] = 0.0
    draft = _chains([2, 2], torch.tensor([0, 1, 0, 1]), q)
    sampled = sample(p, rows, 3)
    for seed in range(20):
        coins = draw_coins(_rows(4, 1.0, seed=seed))
        verdict = verify_rejection(draft, p, sampled, rows.temperature, coins, vocab_size=3)
        assert verdict.token_ids[0].tolist() == [1, 0]


def test_b25_bad_rows_reject_or_fail_and_every_other_request_gets_a_token() -> None:
    p = torch.zeros(6, 3)
    p[2, 0] = math.nan  # the root of request 1
    q = torch.zeros(6, 3)
    q[1] = math.nan  # the draft of request 0
    rows = _rows(6, 1.0, seed=8)
    draft = _chains([2, 2, 2], torch.tensor([0, 1, 0, 1, 0, 1]), q)
    sampled = sample(p, rows, 3)
    ones = torch.full((6,), 1e-6, dtype=torch.float64)
    verdict = verify_rejection(draft, p, sampled, rows.temperature, Coins(ones, ones), vocab_size=3)
    assert verdict.num_tokens.tolist() == [1, 0, 2]
    assert verdict.failed.tolist() == [False, True, False]
    assert verdict.token_ids[0].tolist() == [0, -1]


def test_x05_draft_accept_and_residual_streams_differ_and_repeat() -> None:
    rows = _rows(4000, 1.0, seed=9)
    one, two = draw_coins(rows), draw_coins(rows)
    assert torch.equal(one.accept, two.accept)
    assert torch.equal(one.residual, two.residual)
    correlation = torch.corrcoef(torch.stack((one.accept, one.residual)))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(4000)
    for coins in (one.accept, one.residual):
        assert 0 < coins.min() < coins.max() < 1
        assert coins.mean().item() == pytest.approx(0.5, abs=0.03)
