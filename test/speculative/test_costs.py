"""Tables of what steps and drafts cost, measured at start and corrected while serving."""

import random

import pytest
from drafters import drafter_engine
from harness import Job, expect_plain, make_prompts

from truespec.params import SamplingParams
from truespec.speculative import profile
from truespec.speculative.costs import CostTable, DraftCosts
from truespec.speculative.profile import ROUNDS, measure_costs


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


TRUTH = {1: 1.0, 2: 1.2, 4: 1.8, 8: 3.0}


def serve(table, sizes, *, slowness=1.0, seed=0):
    """Steps of these sizes with the noise of a shared machine."""
    draws = random.Random(seed)
    for size in sizes:
        noise = draws.lognormvariate(0.0, 0.08) * (3.0 if draws.random() < 0.05 else 1.0)
        table.learn(size, slowness * TRUTH[size] * noise)


@pytest.mark.parametrize("error", [1.8, 1 / 1.8])
@pytest.mark.parametrize("wrong", [2, 4])
def test_a_wrong_point_recovers_within_a_few_dozen_steps_and_the_others_stay(wrong, error):
    seconds = [t * (error if size == wrong else 1.0) for size, t in TRUTH.items()]
    table = CostTable(list(TRUTH), seconds)
    for probe in range(36):
        serve(table, [1] * 25 + [wrong], seed=probe)
    assert table.at(wrong) == pytest.approx(TRUTH[wrong], rel=0.1)
    for size in TRUTH.keys() - {wrong}:
        assert table.at(size) == pytest.approx(TRUTH[size], rel=0.1)


def test_a_machine_that_gets_slower_moves_the_scale_and_no_factor():
    table = CostTable(list(TRUTH), list(TRUTH.values()))
    serve(table, random.Random(1).choices([1, 2, 4], [6, 2, 2], k=1500), slowness=1.5)
    assert table.scale == pytest.approx(1.5, rel=0.1)
    assert table.factors == pytest.approx([1.0] * 4, abs=0.1)
    assert table.at(8) == pytest.approx(1.5 * TRUTH[8], rel=0.1)


def test_a_size_between_two_points_moves_both_by_their_shares():
    table = CostTable([1, 2, 6], [1.0, 2.0, 6.0])
    for _ in range(50):
        table.learn(1, 1.0)
    table.learn(3, 9.0)
    near, far = table.factors[1] - 1, table.factors[2] - 1
    assert near > far > 0
    assert table.factors[0] == 1.0


def test_beyond_the_last_point_cost_never_falls():
    table = CostTable([1, 16, 32], [1.0, 10.0, 11.0])
    for _ in range(30):
        table.learn(1, 1.0)
        table.learn(16, 19.0)
        table.learn(32, 6.0)
    assert table.at(16) > table.at(32)
    assert table.at(256) == pytest.approx(table.at(32))
    assert table.at(32) > 0


def test_another_point_becoming_the_yardstick_changes_no_cost_of_a_seen_size():
    table = CostTable([1, 4, 16], [1.0, 4.0, 16.0])
    for size, seconds in [(1, 1.0)] * 3 + [(4, 9.0)] * 3:
        table.learn(size, seconds)
    before = [table.at(1), table.at(4)]
    assert table.factors[0] == 1.0
    assert table.factors[1] > 1.0
    table.learn(4, 9.0)
    assert table.factors[1] == 1.0
    assert [table.at(1), table.at(4)] == pytest.approx([1.02 * t for t in before], rel=1e-3)


@pytest.mark.parametrize(
    "name", ["ngram", "dspark", "eagle3 tree 2x2", "nextn", "multi-layer chained"]
)
def test_profiling_measures_what_fits_and_leaves_the_worker_as_it_was(name):
    engine = drafter_engine(name, "llama")
    planner = engine.worker.planner
    costs = measure_costs(engine.worker)
    assert engine.worker.planner is planner
    assert costs.rows.sizes == [1, 2, 4, 8]  # the engine takes eight requests
    assert costs.rows.seconds == sorted(costs.rows.seconds)
    for table in costs.drafts.tables:
        assert table.sizes == [1, 4]
        assert table.seconds[0] > 0
    jobs = [Job(ids, SamplingParams(seed=1, max_tokens=8)) for ids in make_prompts(3)]
    expect_plain("llama", jobs, engine.run(jobs))


def test_a_size_costs_what_is_typical_whatever_disturbs_some_rounds(monkeypatch):
    calls = []

    def measure(worker, count, lengths):
        calls.append(count)
        number = calls.count(count)
        factor = {1: 0.7, 2: 5.0, 3: 3.0}.get(number, 1.0 + 0.01 * number)
        return {length: factor * (count + length) for length in (0, *lengths)}

    monkeypatch.setattr(profile, "_measure", measure)
    costs = measure_costs(drafter_engine("dspark", "llama").worker)
    assert calls.count(1) == calls.count(8) == ROUNDS
    assert calls.count(16) == calls.count(32) == 2
    assert calls[:7] == [1, 2, 4, 8, 16, 32, 1]
    for size in (1, 2, 4, 8):
        assert costs.rows.at(size) == pytest.approx(size, rel=0.1)
    assert costs.drafts.at(4, 3) == pytest.approx(7, rel=0.1)


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


def test_what_two_steps_said_of_a_size_fades_when_it_is_not_tried_again():
    table = CostTable([1, 2, 3], [1.0, 1.1, 1.4])
    for size, seconds in [(1, 1.0)] * 30 + [(3, 2.8)] * 2:
        table.learn(size, seconds)
    assert table.factors[2] > 1.15
    for _ in range(3000):
        table.learn(2, 1.1)
    assert table.factors[2] == pytest.approx(1.0, abs=0.02)
