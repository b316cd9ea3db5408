"""Accepted lengths from records."""

import math

from truespec.bench.acceptance import accepted_lengths
from truespec.core import TokenRecord


def step(first_id, num_accepted, num_drafts=3):
    """Records of one step with consecutive ids."""
    return [
        TokenRecord(
            first_id + i,
            "draft" if i < num_accepted else "target",
            position=i,
            num_drafts=num_drafts,
        )
        for i in range(num_accepted + 1)
    ]


def test_mean_counts_the_bonus_token_and_leaves_the_cut_last_step_out():
    counts = accepted_lengths([step(0, 2) + step(10, 0) + step(20, 3)])
    assert (counts.num_steps, counts.num_tokens) == (2, 4)
    assert counts.mean == 2.0


def test_conditional_acceptance_counts_only_reached_positions():
    counts = accepted_lengths([step(0, 2) + step(10, 0) + step(20, 1) + step(30, 0)])
    assert counts.verified == [3, 2, 1]
    assert counts.accepted == [2, 1, 0]
    assert counts.conditional == [2 / 3, 0.5, 0.0]


def test_plain_steps_do_not_count():
    counts = accepted_lengths([step(0, 0, num_drafts=0) * 3])
    assert counts.num_steps == 0
    assert math.isnan(counts.mean)


def test_steps_that_repeat_a_4_gram_are_left_out_of_the_fresh_mean():
    # The first token of the second block ends the new 4-gram 1 2 3 0, that of the third repeats it.
    looped = step(0, 3) * 3 + step(99, 0)
    counts = accepted_lengths([looped])
    assert counts.num_steps == 3
    assert counts.num_fresh_steps == 2
