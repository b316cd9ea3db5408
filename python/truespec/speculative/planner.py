"""How many drafts are worth verifying: from what steps cost and from what was accepted so far.

Under coupled verification any schedule leaves the output unchanged, so the plan may look at
everything. Symbols of DSpark (arXiv 2607.05147, section 3.4): a_j the survival of draft j (the
probability that it and all before it are accepted), B rows of the step, tau expected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from truespec.speculative.calibration import Calibration, log_odds
from truespec.speculative.costs import StepCosts
from truespec.speculative.yields import Yield

MIN_GAIN = 1.04  # predicted gain below which drafts are left out: estimates are noisy
PROBE_SHARE = 0.005  # of the time without drafts goes into trying some
LONGER_SHARE = 0.005  # of the time with drafts goes into trying longer ones
PROBE_STEPS = 4  # in a row: the first finds the drafter's weights out of every cache
FIRST_TRIES = 0.15  # seconds that may at once: what was measured at start may have been disturbed
REPLAN_STEPS = 16  # steps for which a plan holds, if nothing else changes
LEAST_SHARE = 0.1  # of the last steps had drafts, or their caches are not worth keeping up
SHARE_LEARNING = 0.01  # weight of a step in that share
NUM_FIRST = 8  # steps of a request that tell how a new one starts


class _Made(NamedTuple):
    """Drafts of a request that are about to be verified: log-odds and chances of each."""

    calibration: Calibration
    odds: list[float]
    chances: list[float]


class _Prospect(NamedTuple):
    """Of a request: expected drafts accepted and verified if 0..n are made; what it may have."""

    tokens: list[float]
    rows: list[float]
    cap: int


@dataclass(slots=True)
class Planner:
    """Chooses draft lengths step by step.

    Args:
        num_drafts: drafts per request at most.
        costs: `None` drafts as much as it may.
        is_whole: drafts cannot be cut before they are made, only afterwards (trees).
        credit: seconds that may go into trying drafts where none seem to pay.
    """

    num_drafts: int
    costs: StepCosts | None
    is_whole: bool = False
    credit: float = FIRST_TRIES
    _overall: Yield = field(init=False)
    _yields: dict[str, Yield] = field(default_factory=dict)
    _made: dict[str, _Made] = field(default_factory=dict)
    _calibrations: dict[bool, Calibration] = field(default_factory=dict)  # greedy or not
    _planned_for: tuple[list[str], int] | None = None
    _plan_age: int = 0  # steps
    _length: int = 1  # that pays best, or would if any did
    _drafting: list[int] = field(default_factory=list)  # places of the requests that get drafts
    _share: float = 1.0  # of steps with drafts, of late
    _spare: float = 0.0  # seconds that may go into longer drafts than seem to pay
    _probe_left: int = 0  # steps of a row of tries
    _is_probe: bool = False
    _has_drafts: list[bool] = field(default_factory=lambda: [False, False])  # the last two steps

    def __post_init__(self) -> None:
        self._overall = Yield.first(self.num_drafts)

    @property
    def pays(self) -> bool:
        """Some part of the last steps had drafts, or all have."""
        return self.costs is None or self._share > LEAST_SHARE

    def counts(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        """Drafts to make per decoding request.

        Args:
            rids: its requests. caps: what each of them may have.
            other_rows: prompt rows in the same step.
        """
        self._is_probe = False
        if self.costs is None or not any(caps):
            return caps
        if self._planned_for != (rids, other_rows) or self._plan_age >= REPLAN_STEPS:
            self._planned_for, self._plan_age = (rids, other_rows), 0
            self._length, self._drafting = self._best(rids, caps, other_rows)
        self._plan_age += 1
        if not self._drafting:
            self._share -= SHARE_LEARNING * self._share
            return self._idle_or_probe(rids, caps, other_rows)
        self._share += SHARE_LEARNING * (1.0 - self._share)
        counts = [0] * len(caps)
        for index in self._drafting:
            counts[index] = min(caps[index], self._length)
        if self._plan_age == 1:
            self._try_longer(counts, caps, other_rows)
        return counts

    def forget(self, rid: str) -> None:
        """The request is over."""
        self._yields.pop(rid, None)
        self._made.pop(rid, None)

    def trim(self, survivals: list[list[float]], other_rows: int) -> list[int]:
        """Drafts to verify per request once they are made (their cost is spent).

        Rows are admitted by falling survival, equal ones by position and then request, until the
        expected tokens per second fall.

        Args:
            survivals: a_j of each draft by request, falling along j.
            other_rows: rows of the step that are run anyway.
        """
        if self.costs is None or self._is_probe:
            return [len(values) for values in survivals]
        order = sorted(
            (-value, j, r) for r, values in enumerate(survivals) for j, value in enumerate(values)
        )
        counts = [0] * len(survivals)
        tokens = float(len(survivals))
        rows = len(survivals) + other_rows
        best = tokens / self.costs.rows.at(rows)
        admitted = list(counts)
        for negative, _, request in order:
            tokens -= negative
            rows += 1
            admitted[request] += 1
            if tokens / self.costs.rows.at(rows) > best:
                best = tokens / self.costs.rows.at(rows)
                counts = list(admitted)
        return counts

    def learn_costs(
        self,
        *,
        num_rows: int,
        seconds: float,
        counts: list[int],
        draft_seconds: float,
        is_typical: bool = True,
    ) -> None:
        """Learn from a step without prompt rows.

        Args:
            num_rows: rows it verified. counts: drafts it made per request.
            seconds: for all but drafting. draft_seconds: for drafting.
            is_typical: the latter tell something of other steps.
        """
        if self.costs is None:
            return
        num_blocks = sum(count > 0 for count in counts)
        self._has_drafts = [self._has_drafts[1], num_blocks > 0]
        if num_blocks and not self._is_probe:
            self._spare += LONGER_SHARE * seconds
        elif not num_blocks:
            self.credit += PROBE_SHARE * seconds
        elif self._drafting:
            self._spare -= self._extra(num_rows)
        else:
            extra = self.costs.rows.at(num_rows) - self.costs.rows.at(len(counts))
            self.credit -= draft_seconds + extra
        if self._has_drafts[0] != self._has_drafts[1]:
            return  # a step finds in the caches what the one before it used
        self.costs.rows.learn(num_rows, seconds)
        if num_blocks and is_typical:
            self.costs.drafts.learn(num_blocks, max(counts), draft_seconds)

    def expect(self, rid: str, logprobs: Sequence[float], *, is_greedy: bool) -> list[float]:
        """Survivals a_j of the drafts just made for a request, from the drafter's own logprobs."""
        calibration = self._calibrations.setdefault(is_greedy, Calibration())
        odds = [log_odds(logprob) for logprob in logprobs]
        chances = [calibration.chance(x) for x in odds]
        self._made[rid] = _Made(calibration, odds, chances)
        return list(accumulate(chances, mul))

    def observe(self, rid: str, num_made: int, num_verified: int, num_accepted: int) -> None:
        """Learn from a step that drafted for a request: drafts made, verified and accepted."""
        if rid not in self._yields:
            self._yields[rid] = self._overall.start()
        made = self._made.pop(rid, None)
        chances = [] if made is None else made.chances
        if made is not None:
            for place in range(min(num_verified, num_accepted + 1)):
                made.calibration.learn(made.odds[place], place < num_accepted)
        if not self.is_whole:
            num_made = len(chances) or num_verified
        learners = [self._yields[rid]]
        if learners[0].num_steps < NUM_FIRST:
            learners.append(self._overall)
        for known in learners:
            known.learn(num_made, num_verified, num_accepted, chances)
        if self._is_probe and not self._drafting:
            self._planned_for = None

    def _best(self, rids: list[str], caps: list[int], other_rows: int) -> tuple[int, list[int]]:
        """The length with the most tokens per second, and the requests that get drafts of it."""
        assert self.costs is not None, "without costs nothing is planned"
        base_rows = len(caps) + other_rows
        yields = [self._yields.get(rid, self._overall) for rid in rids]
        order = [index for index, cap in enumerate(caps) if cap]
        if len(order) > 1:
            order.sort(key=lambda index: -yields[index].tokens[-1])
        plain = rate = len(caps) / self.costs.rows.at(base_rows)
        lengths = range(self.num_drafts if self.is_whole else 1, self.num_drafts + 1)
        length = num_reqs = 0
        for _ in range(2):  # a row has to be worth what the best plan makes of its time
            wishes = [
                self._prospect(yields[index], caps[index], base_rows, rate) for index in order
            ]
            rate, length, num_reqs = max(
                self._best_number(length, wishes, len(caps), base_rows) for length in lengths
            )
            if rate <= plain * MIN_GAIN:
                return length, []
        return length, order[:num_reqs]

    def _best_number(
        self, length: int, wishes: list[_Prospect], num_tokens: int, num_rows: int
    ) -> tuple[float, int, int]:
        """Tokens per second with the best number of the first `wishes`; `length`; the number."""
        assert self.costs is not None, "without costs nothing is planned"
        tokens, rows = float(num_tokens), float(num_rows)
        best = last = (0.0, length, 0)
        for num_reqs, known in enumerate(wishes, start=1):
            taken = min(known.cap, length)
            tokens += known.tokens[taken]
            rows += known.rows[taken]
            seconds = self._seconds(rows) + self.costs.drafts.at(num_reqs, length)
            now = (tokens / seconds, length, num_reqs)
            best = max(best, now)
            if now < last:
                break
            last = now
        return best

    def _seconds(self, rows: float) -> float:
        """Of a step with so many rows on average."""
        assert self.costs is not None, "without costs nothing is planned"
        below = int(rows)
        low, high = self.costs.rows.at(below), self.costs.rows.at(below + 1)
        return low + (rows - below) * (high - low)

    def _prospect(self, known: Yield, cap: int, base_rows: int, rate: float) -> _Prospect:
        """What drafts of a request would bring.

        Args:
            rate: tokens per second that a row has to be worth.
        """
        assert self.costs is not None, "without costs nothing is planned"
        if self.is_whole:
            return _Prospect(known.tokens, known.rows, cap)
        if not (known.recent or self._overall.recent):
            rows = [float(n) for n in range(self.num_drafts + 1)]
            return _Prospect(known.tokens, rows, cap)
        seconds = [self.costs.rows.at(base_rows + n) for n in range(self.num_drafts + 1)]
        prices = [rate * (more - less) for less, more in pairwise(seconds)]
        return _Prospect(*known.trimmed(self._overall.recent, prices), cap)

    def _idle_or_probe(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        """No drafts, or now and then some for the request of which least is known."""
        counts = [0] * len(caps)
        if other_rows or not (self._probe_left or self._can_probe(len(caps))):
            return counts
        self._is_probe = True
        self._probe_left = (self._probe_left or PROBE_STEPS) - 1
        index = min(
            (i for i, cap in enumerate(caps) if cap),
            key=lambda i: self._yields[rids[i]].num_steps if rids[i] in self._yields else 0,
        )
        counts[index] = min(caps[index], self._length)
        return counts

    def _try_longer(self, counts: list[int], caps: list[int], other_rows: int) -> None:
        """Give a request one draft more than planned, now and then: that rows are dear, or later
        drafts in vain, may have been learnt in a bad moment, and is found out only by trying."""
        index = self._drafting[0]
        num_rows = len(caps) + other_rows + sum(counts)
        if counts[index] < caps[index] and self._spare > self._extra(num_rows + 1):
            counts[index] += 1
            self._is_probe = True

    def _extra(self, num_rows: int) -> float:
        """Seconds that the last of so many rows takes."""
        assert self.costs is not None, "without costs nothing is planned"
        return self.costs.rows.at(num_rows) - self.costs.rows.at(num_rows - 1)

    def _can_probe(self, num_rows: int) -> bool:
        """Enough time went by without drafts to spend some of it."""
        assert self.costs is not None, "without costs nothing is planned"
        rows = self.costs.rows
        extra = rows.at(num_rows + self._length) - rows.at(num_rows)
        return self.credit > PROBE_STEPS * (extra + self.costs.drafts.at(1, self._length))
