"""Counts of speculative steps are sums over kept records."""

from __future__ import annotations

from truespec.core import TokenRecord
from truespec.tokenizer.acceptance import acceptance_of, joined


def step(num_accepted: int, num_drafts: int, *, kept: int | None = None) -> list[TokenRecord]:
    records = [TokenRecord(1, "draft", i, num_drafts) for i in range(num_accepted)]
    return [*records, TokenRecord(2, "target", num_accepted, num_drafts)][:kept]


PREFILL = TokenRecord(3, "prefill")
PLAIN = TokenRecord(4, "target")


def test_steps_begin_at_position_0_and_plain_tokens_do_not_count() -> None:
    counts = acceptance_of([PREFILL, *step(2, 3), PLAIN, *step(0, 3), *step(3, 3)])
    assert (counts.num_steps, counts.num_drafts, counts.num_accepted) == (3, 9, 5)
    assert counts.num_tokens == 8
    assert counts.histogram == [1, 0, 1, 1]
    assert counts.per_position == [2, 2, 1]
    assert counts.mean_length == 8 / 3
    assert counts.rate == 5 / 9


def test_a_trimmed_step_counts_only_what_was_kept() -> None:
    counts = acceptance_of([PREFILL, *step(3, 4, kept=2)])
    assert (counts.num_accepted, counts.num_tokens, counts.num_steps) == (2, 2, 1)
    assert counts.histogram == [0, 0, 1, 0, 0]


def test_no_speculation_gives_zeros_and_no_division_by_zero() -> None:
    counts = acceptance_of([PREFILL, PLAIN])
    assert (counts.mean_length, counts.rate, counts.histogram) == (0.0, 0.0, [0])
    assert counts.padded_histogram(3) == [0, 0, 0, 0]


def test_joined_counts_add_up_with_different_draft_lengths() -> None:
    total = joined([acceptance_of(step(1, 2)), acceptance_of(step(4, 4))])
    assert total.histogram == [0, 1, 0, 0, 1]
    assert total.per_position == [2, 1, 1, 1]
    assert (total.num_steps, total.num_accepted, total.num_tokens) == (2, 5, 7)
