"""Draft lengths from costs and acceptance."""

import random
from math import log

import pytest

from truespec.speculative.costs import CostTable, DraftCosts, StepCosts
from truespec.speculative.planner import (
    FIRST_TRIES,
    LONGER_SHARE,
    PROBE_SHARE,
    PROBE_STEPS,
    REPLAN_STEPS,
    Planner,
)
from truespec.speculative.yields import Yield


def table(points):
    return CostTable([s for s, _ in points], [t for _, t in points])


def planner(rows, drafts=((1, 0.001),), num_drafts=4, is_whole=False, credit=0.0):
    """`drafts`: seconds by length, for any number of requests."""
    lengths = DraftCosts([n for n, _ in drafts], [table([(1, t)]) for _, t in drafts])
    return Planner(num_drafts, StepCosts(table(rows), lengths), is_whole, credit)


def names(caps):
    return [f"r{i}" for i in range(len(caps))]


def learn(made, rid, *, steps, num_made=4, num_verified=None, num_accepted):
    for _ in range(steps):
        verified = num_made if num_verified is None else num_verified
        made.observe(rid, num_made, verified, num_accepted)


def replan(made, rids, caps):
    """Counts once the plan that holds has run out."""
    for _ in range(REPLAN_STEPS):
        made.counts(rids, caps, 0)
    return made.counts(rids, caps, 0)


FLAT = ((1, 0.010), (32, 0.011))  # more rows cost next to nothing
STEEP = ((1, 0.010), (2, 0.020), (32, 0.320))  # every row costs as much as the first
MIDDLE = ((1, 0.010), (5, 0.018), (32, 0.080))


def test_without_costs_everything_allowed_is_drafted():
    assert Planner(4, None).counts(names([4, 2, 0]), [4, 2, 0], 0) == [4, 2, 0]


def test_cheap_rows_are_all_drafted_and_dear_ones_not():
    assert planner(FLAT).counts(names([4, 2]), [4, 2], 0) == [4, 2]
    assert planner(STEEP).counts(names([4, 4]), [4, 4], 0) == [0, 0]


def test_length_follows_acceptance():
    lengths = []
    for accepted in (0, 1, 2, 4):
        made = planner(MIDDLE)
        learn(made, "r0", steps=40, num_accepted=accepted)
        lengths.append(made.counts(["r0"], [4], 0)[0])
    assert lengths[0] == 0
    assert lengths == sorted(lengths)
    assert lengths[-1] == 4


def test_length_follows_what_drafting_costs_by_length():
    learnt = []
    for seconds in (0.001, 0.060):
        made = planner(FLAT, drafts=((1, 0.001), (4, seconds)))
        learn(made, "r0", steps=40, num_accepted=2)
        learnt.append(made.counts(["r0"], [4], 0)[0])
    assert learnt == [2, 1]


def test_drafts_that_cannot_be_cut_come_whole_or_not_at_all():
    made = planner(MIDDLE, is_whole=True)
    learn(made, "r0", steps=40, num_accepted=2)
    assert made.counts(["r0"], [4], 0) == [4]
    learn(made, "r0", steps=40, num_accepted=0)
    assert replan(made, ["r0"], [4]) == [0]


def test_only_requests_that_gain_by_drafts_get_some():
    made = planner(MIDDLE, drafts=((1, 0.002), (4, 0.002)))
    learn(made, "r0", steps=40, num_accepted=4)
    learn(made, "r1", steps=40, num_accepted=0)
    assert made.counts(["r0", "r1"], [4, 4], 0) == [4, 0]
    assert made.counts(["r0", "r1"], [2, 4], 0) == [2, 0]


def test_a_few_steps_tell_what_drafts_bring_to_a_request():
    made = planner(MIDDLE)
    learn(made, "old", steps=200, num_accepted=0)
    assert made.counts(["new"], [4], 0) == [0]
    learn(made, "new", steps=3, num_accepted=4)
    assert replan(made, ["new"], [4]) == [4]


def test_a_new_request_starts_from_what_the_first_steps_of_others_brought():
    made = planner(MIDDLE)
    for index in range(20):
        learn(made, f"r{index}", steps=4, num_accepted=0)
    assert made.counts(["new"], [4], 0) == [0]
    learn(made, "lucky", steps=400, num_accepted=4)
    assert made.counts(["new"], [4], 0) == [0]


def test_what_trees_really_verify_decides_on_them():
    """One node of four is accepted, whether the others were verified or not."""
    made = planner(((1, 0.010), (2, 0.011), (5, 0.025)), is_whole=True)
    learn(made, "cut", steps=60, num_verified=1, num_accepted=1)
    learn(made, "whole", steps=60, num_verified=4, num_accepted=1)
    assert made.counts(["cut"], [4], 0) == [4]
    assert made.counts(["whole"], [4], 0) == [0]


def expect(made, rid, chances, is_greedy=True):
    return made.expect(rid, [log(chance) for chance in chances], is_greedy=is_greedy)


def test_chances_tell_of_drafts_that_were_not_verified():
    """One draft of four is verified and accepted; the others would have been, or would not."""
    lengths = []
    for chance in (0.05, 0.95):
        made = planner(FLAT, drafts=((1, 0.001), (4, 0.004)))
        for _ in range(60):
            expect(made, "r0", [0.9] + [chance] * 3)
            made.observe("r0", 4, 1, 1)
        lengths.append(made.counts(["r0"], [4], 0)[0])
    assert lengths == [1, 4]


def test_chances_become_survivals_by_what_came_of_such_drafts():
    made = planner(FLAT)
    assert expect(made, "r0", [0.8, 0.5]) == pytest.approx([0.8, 0.4])
    draw = random.Random(0)
    for _ in range(3000):  # in truth the drafter is too sure of itself
        own = draw.choice((0.3, 0.6, 0.9))
        expect(made, "r0", [own])
        made.observe("r0", 1, 1, draw.random() < 0.5 * own)
    found = [expect(made, "r0", [own])[0] for own in (0.3, 0.6, 0.9)]
    assert found == pytest.approx([0.15, 0.3, 0.45], abs=0.07)
    assert expect(made, "r1", [0.6], is_greedy=False) == pytest.approx([0.6])


def test_longer_drafts_pay_where_the_unsure_ones_will_be_trimmed():
    """The second draft is accepted half the time, and whether is known before it is verified."""
    rows = ((1, 0.010), (2, 0.0103), (3, 0.0137), (32, 0.160))
    lengths = []
    for chances in ((0.9, 0.1), (0.5, 0.5)):
        made = planner(rows, drafts=((1, 0.001), (2, 0.0012), (4, 0.010)))
        draw = random.Random(0)
        for step in range(400):
            second = chances[step % 2]
            expect(made, "r0", [0.8, second])
            hits = draw.random() < 0.8, draw.random() < second
            made.observe("r0", 2, 2, 0 if not hits[0] else 1 + hits[1])
        lengths.append(made.counts(["r0"], [4], 0)[0])
    assert lengths == [2, 1]


def test_the_worth_of_a_length_is_counted_on_the_last_drafts():
    known = Yield.first(3)
    known.accepted[2] = 0.5
    known.recent += [[0.9, 0.9], [0.1, 0.9]]
    tokens, rows = known.trimmed(known.recent, [0.2, 0.3, 0.4])
    assert tokens == pytest.approx([0.0, 0.45, (0.9 + 0.81) / 2, (0.9 + 0.81 + 0.405) / 2])
    assert rows == [0.0, 0.5, 1.0, 1.5]
    tokens, rows = known.trimmed([[0.5], [0.5]], [0.2, 0.9, 0.9])
    assert tokens == pytest.approx([0.0, (0.9 + 0.5 + 0.5) / 4] + [(0.9 + 0.5 + 0.5) / 4] * 2)
    assert rows == [0.0, 0.75, 0.75, 0.75]


def test_tries_come_in_a_row_are_not_trimmed_and_the_first_teaches_no_costs():
    made = planner(STEEP, credit=FIRST_TRIES)
    learn(made, "r0", steps=100, num_accepted=0)
    before = made.costs.drafts.at(1, 1)
    counts, costs = [], []
    for _ in range(PROBE_STEPS + 1):
        counts += made.counts(["r0"], [4], 0)
        if counts[-1]:
            expect(made, "r0", [0.01])
            assert made.trim([[0.01]], other_rows=0) == [1]
        made.learn_costs(num_rows=2, seconds=0.02, counts=counts[-1:], draft_seconds=0.5)
        costs.append(made.costs.drafts.at(1, 1))
    assert counts == [1] * PROBE_STEPS + [0]
    assert costs[0] == before < costs[1] < costs[2]


def test_trying_takes_a_small_share_of_the_time_without_drafts():
    made = planner(STEEP, drafts=((1, 0.010), (4, 0.040)))
    learn(made, "r0", steps=100, num_accepted=0)
    spent = idle = 0.0
    for _ in range(4000):
        (count,) = made.counts(["r0"], [4], 0)
        rows = 1 + count
        drafting = made.costs.drafts.at(1, count) if count else 0.0
        made.learn_costs(num_rows=rows, seconds=rows * 0.01, counts=[count], draft_seconds=drafting)
        spent += drafting + count * 0.01
        idle += 0.01
    assert 0.5 * PROBE_SHARE < spent / idle < 1.1 * PROBE_SHARE


def test_costs_measured_in_a_busy_moment_are_put_right_by_the_first_tries():
    busy = ((1, 0.010), (2, 0.019))  # in truth 2 rows take 0.0105 and drafting 0.002
    made = planner(busy, drafts=((1, 0.004),), num_drafts=1, credit=FIRST_TRIES)
    learn(made, "r0", steps=20, num_made=1, num_accepted=1)
    chosen = []
    for _ in range(60):
        (count,) = made.counts(["r0"], [1], 0)
        chosen.append(count)
        seconds = 0.0105 if count else 0.010
        made.learn_costs(num_rows=1 + count, seconds=seconds, counts=[count], draft_seconds=0.002)
        if count:
            made.observe("r0", 1, 1, 1)
    assert made.costs.rows.at(2) < 0.014
    assert chosen[-20:] == [1] * 20


def test_longer_drafts_are_tried_where_their_rows_seemed_dear_at_start():
    """In truth a third row takes 1 ms; 5 ms were measured, and no plan has three rows at first."""
    rows = ((1, 0.010), (2, 0.0105), (3, 0.0155), (5, 0.0255))
    made = planner(rows, drafts=((1, 0.001), (4, 0.004)))
    lengths, spent, total = [], 0.0, 0.0
    for _ in range(4000):
        (count,) = made.counts(["r0"], [4], 0)
        (verified,) = made.trim([expect(made, "r0", [0.9, 0.6, 0.1, 0.1][:count])], other_rows=0)
        made.observe("r0", count, verified, min(verified, 2))
        seconds = 0.010 + 0.0005 * (verified > 0) + 0.001 * max(verified - 1, 0)
        drafting = 0.001 * count
        made.learn_costs(
            num_rows=1 + verified, seconds=seconds, counts=[count], draft_seconds=drafting
        )
        lengths.append(count)
        total += seconds + 0.001
        spent += 0.001 * max(verified - 2, 0)
    assert lengths[:10] == [1] * 10
    assert set(lengths[-100:]) <= {2, 3}
    assert lengths[-100:].count(2) > 90
    assert spent / total < 1.5 * LONGER_SHARE


def test_a_plan_holds_for_some_steps_of_the_same_requests(monkeypatch):
    made, num_plans = planner(FLAT), []
    whole = Planner._best
    monkeypatch.setattr(
        Planner, "_best", lambda self, *args: num_plans.append(1) or whole(self, *args)
    )
    for _ in range(3 * REPLAN_STEPS):
        assert made.counts(["r0"], [4], 0) == [4]
    assert len(num_plans) == 3
    assert made.counts(["r0", "r1"], [1, 4], 0) == [1, 4]
    assert made.counts(["r0", "r1"], [0, 4], 0) == [0, 4]
    assert len(num_plans) == 4


def test_the_request_of_which_least_is_known_is_tried():
    made = planner(STEEP)
    learn(made, "r0", steps=9, num_accepted=0)
    learn(made, "r1", steps=8, num_accepted=0)
    tried = []
    for _ in range(3000):
        counts = made.counts(["r0", "r1"], [4, 4], 0)
        made.learn_costs(num_rows=2, seconds=0.02, counts=counts, draft_seconds=0.001)
        for rid, count in zip(["r0", "r1"], counts, strict=True):
            if count:
                tried.append(rid)
                made.observe(rid, count, count, 0)
    assert tried[:3] in (["r1", "r0", "r1"], ["r1", "r1", "r0"])
    assert len(tried) > 3


def test_drafts_pay_as_long_as_some_part_of_the_steps_has_them():
    made = planner(MIDDLE)
    learn(made, "bad", steps=100, num_accepted=0)
    learn(made, "good", steps=100, num_accepted=4)

    def pays_after(names):
        for rid in names:
            made.counts([rid], [4], 0)
        return made.pays

    assert pays_after(["bad"] * 100)
    assert not pays_after(["bad"] * 300)
    assert pays_after(["good", "bad", "bad"] * 100)
    assert not pays_after((["good"] + ["bad"] * 30) * 30)
    made.costs = None
    assert made.pays


def test_costs_follow_what_steps_take_while_serving():
    made = planner(FLAT)
    assert made.counts(["r0"], [4], 0) == [4]
    for _ in range(200):
        made.learn_costs(num_rows=5, seconds=0.02, counts=[4], draft_seconds=0.2)
    assert replan(made, ["r0"], [4]) == [0]


def test_one_odd_measurement_does_not_turn_drafting_off():
    made = planner(FLAT)
    made.learn_costs(num_rows=5, seconds=60.0, counts=[4], draft_seconds=60.0)
    assert made.counts(["r0"], [4], 0) == [4]


def test_trim_admits_by_survival_until_rows_cost_more_than_they_bring():
    made = planner(((1, 0.010), (4, 0.013), (5, 0.030), (32, 0.300)))
    assert made.trim([[0.9, 0.8, 0.1], [0.2]], other_rows=0) == [2, 0]
    assert planner(FLAT).trim([[0.9, 0.8, 0.7]], other_rows=0) == [3]


def test_trim_breaks_ties_by_position_then_request():
    made = planner(((1, 0.010), (3, 0.011), (4, 0.050), (32, 0.5)))
    assert made.trim([[0.5, 0.5], [0.5, 0.5]], other_rows=0) == [1, 0]
