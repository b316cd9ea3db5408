"""Draft lengths from costs and acceptance."""

from itertools import pairwise

from truespec.speculative.planner import PROBE_LENGTH, PROBE_STEPS, CostTable, Planner, StepCosts


def planner(rows, blocks=((1, 0.001),), num_drafts=4, acceptance=0.8):
    def table(points):
        return CostTable([s for s, _ in points], [t for _, t in points])

    made = Planner(num_drafts, StepCosts(table(rows), table(blocks)))
    made.acceptance = [acceptance] * num_drafts
    return made


def names(caps):
    return [f"r{i}" for i in range(len(caps))]


FLAT = ((1, 0.010), (32, 0.011))  # more rows cost next to nothing
STEEP = ((1, 0.010), (2, 0.020), (32, 0.320))  # every row costs as much as the first


def test_cost_is_linear_between_points_and_beyond_them():
    table = CostTable([1, 4, 8], [1.0, 4.0, 6.0])
    assert [table.at(n) for n in (0, 1, 2, 4, 6, 8, 10)] == [0, 1, 2, 4, 5, 6, 7]


def test_without_costs_everything_allowed_is_drafted():
    assert Planner(4, None).counts(names([4, 2, 0]), [4, 2, 0], 0) == [4, 2, 0]


def test_cheap_rows_are_all_drafted_and_dear_ones_not():
    assert planner(FLAT).counts(names([4, 2]), [4, 2], 0) == [4, 2]
    assert planner(STEEP).counts(names([4, 4]), [4, 4], 0) == [0, 0]


def test_length_follows_acceptance():
    middle = ((1, 0.010), (5, 0.018), (32, 0.080))
    lengths = [
        planner(middle, acceptance=a).counts(names([4]), [4], 0)[0] for a in (0.05, 0.5, 0.95)
    ]
    assert lengths[0] == 0
    assert lengths == sorted(lengths)
    assert lengths[-1] == 4


def test_what_does_not_pay_is_tried_again_now_and_then_and_rarer_each_time():
    made = planner(STEEP)
    drafted = [made.counts(names([4]), [4], 0) == [PROBE_LENGTH] for _ in range(PROBE_STEPS * 8)]
    tries = [step for step, was in enumerate(drafted) if was]
    gaps = [b - a for a, b in pairwise(tries)]
    assert tries[0] == PROBE_STEPS
    assert gaps == sorted(gaps)
    assert len(set(gaps)) > 1


def test_acceptance_is_learnt_by_position_and_only_where_it_was_seen():
    made = planner(FLAT, acceptance=0.5)
    for _ in range(200):
        made.observe("a", num_drafts=4, num_accepted=1)
    assert made.acceptance[0] > 0.99
    assert made.acceptance[1] < 0.01
    assert made.acceptance[2:] == [0.5, 0.5]


def test_costs_follow_what_steps_take_while_serving():
    made = planner(FLAT)
    assert made.counts(names([4]), [4], 0) == [4]
    for _ in range(200):
        made.learn_costs(num_rows=5, seconds=0.02, num_blocks=1, draft_seconds=0.2)
    assert abs(made.costs.rows.at(5) - 0.02) < 0.001
    assert abs(made.costs.blocks.at(1) - 0.2) < 0.001
    assert made.counts(names([4]), [4], 0) == [0]


def test_one_odd_measurement_does_not_turn_drafting_off():
    made = planner(FLAT)
    made.learn_costs(num_rows=5, seconds=60.0, num_blocks=1, draft_seconds=60.0)
    assert made.counts(names([4]), [4], 0) == [4]


def test_with_trimmed_drafts_only_requests_that_gain_by_them_get_some():
    made = planner(((1, 0.010), (8, 0.017), (32, 0.060)), blocks=((1, 0.002), (8, 0.004)))
    made.trims = True
    for _ in range(60):
        made.observe("r0", num_drafts=3, num_accepted=2)
        made.observe("r1", num_drafts=1, num_accepted=0)
    assert made.counts(["r0", "r1"], [4, 4], 0) == [4, 0]
    assert made.counts(["r0", "r1"], [2, 4], 0) == [2, 0]
    made.forget("r0")
    for _ in range(200):
        made.observe("r1", num_drafts=1, num_accepted=0)
    assert made.counts(["r1", "new"], [4, 4], 0) == [0, 0]


def test_trim_admits_by_survival_until_rows_cost_more_than_they_bring():
    made = planner(((1, 0.010), (4, 0.013), (5, 0.030), (32, 0.300)))
    assert made.trim([[0.9, 0.8, 0.1], [0.2]], other_rows=0) == [2, 0]
    assert planner(FLAT).trim([[0.9, 0.8, 0.7]], other_rows=0) == [3]


def test_trim_breaks_ties_by_position_then_request():
    made = planner(((1, 0.010), (3, 0.011), (4, 0.050), (32, 0.5)))
    assert made.trim([[0.5, 0.5], [0.5, 0.5]], other_rows=0) == [1, 0]
