"""Tables of what steps and drafts cost."""

import pytest

from truespec.speculative.costs import CostTable, DraftCosts


def test_cost_is_linear_between_points_and_beyond_them():
    table = CostTable([1, 4, 8], [1.0, 4.0, 6.0])
    assert [table.at(n) for n in (0, 1, 2, 4, 6, 8, 10)] == [0, 1, 2, 4, 5, 6, 7]


def test_what_is_learnt_scales_every_size():
    table = CostTable([1, 4], [1.0, 4.0])
    for _ in range(200):
        table.learn(1, 1.5)
    assert table.at(4) == pytest.approx(6.0, rel=0.02)


def test_odd_measurements_do_not_matter_as_long_as_they_are_few():
    table = CostTable([1, 4], [1.0, 4.0])
    for step in range(400):
        table.learn(1, 1000.0 if step % 10 == 0 else 1.2 + 0.001 * (step % 10))
    assert table.at(1) == pytest.approx(1.205, rel=0.04)


def test_drafting_is_linear_in_requests_and_in_length():
    costs = DraftCosts([1, 3], [CostTable([1, 5], [1.0, 5.0]), CostTable([1, 5], [3.0, 11.0])])
    assert costs.at(1, 1) == 1.0
    assert costs.at(3, 1) == 3.0
    assert costs.at(3, 2) == 5.0
    assert costs.at(5, 3) == 11.0
    for _ in range(200):
        costs.learn(5, 3, 22.0)
    assert costs.at(3, 2) == pytest.approx(10.0, rel=0.02)


def test_drafting_that_was_not_measured_is_free():
    assert DraftCosts([1], [CostTable([], [])]).at(3, 1) == 0.0
