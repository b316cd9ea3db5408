"""What drafting brings: how far drafts get verified and accepted, by their length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

FIRST_RATE = 0.7  # before anything is known: drafting is tried
PRIOR_STEPS = 3  # steps that what is known of all requests counts for with a new one
REQUEST_LEARNING = 0.1  # weight of a step in what is known of a request, in the long run
OVERALL_LEARNING = 0.02  # and of all requests
TRUST = 0.5  # what the chance of a verified draft counts beside what came of it
NUM_RECENT = 32  # drafts whose chances are kept


@dataclass(slots=True)
class Yield:
    """Running rates of drafting, by position in the draft.

    Attributes:
        accepted: [n] how often a draft is accepted if all before it are.
        verified: [n] how often one is verified if all before it are.
        counts: [n] drafts that `accepted` knows of.
        slowest: weight of a new step in the long run.
        num_steps: steps learnt from.
        recent: chances of the last drafts, in order of their positions.
    """

    accepted: list[float]
    verified: list[float]
    counts: list[float]
    slowest: float
    num_steps: int
    recent: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    @property
    def tokens(self) -> list[float]:
        """[n + 1] expected drafts accepted of 0..n that are made and verified."""
        return _sums(self.accepted)

    @property
    def rows(self) -> list[float]:
        """[n + 1] expected drafts verified of 0..n that are made."""
        return _sums(self.verified)

    @classmethod
    def first(cls, num_drafts: int) -> Yield:
        """Of all requests, before anything is known."""
        return cls._from([FIRST_RATE] * num_drafts, [FIRST_RATE] * num_drafts, OVERALL_LEARNING)

    def start(self) -> Yield:
        """Of a new request, as far as what is known of all of them tells."""
        return self._from(list(self.accepted), list(self.verified), REQUEST_LEARNING)

    def learn(
        self,
        num_made: int,
        num_verified: int,
        num_accepted: int,
        chances: Sequence[float] = (),
    ) -> None:
        """Move towards what a step brought.

        Args:
            num_made: drafts; those that were not verified brought nothing, unless there are
                chances: then these tell what they would have brought.
            chances: [num_made] conditional acceptance as calibrated, or none. They
                vary less than what happens to one draft, but may be wrong: half of each counts.
        """
        self.num_steps += 1
        if chances:
            self.recent.append(chances)
        alive = 1.0
        for place in range(num_made):
            if place <= num_verified:
                self.verified[place] += self._weight(place) * (
                    (place < num_verified) - self.verified[place]
                )
            trust = 0.0 if not chances else TRUST if place < num_verified else 1.0
            expected = chances[place] if chances else 0.0
            mass = trust * alive + (1 - trust) * (place <= num_accepted)
            hit = trust * expected + (1 - trust) * (place < num_accepted)
            self.accepted[place] += mass * self._weight(place) * (hit - self.accepted[place])
            self.counts[place] += mass
            alive *= expected

    def trimmed(
        self, others: Sequence[Sequence[float]], prices: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """[n + 1] each: drafts accepted and verified on average if 0..n are made, where those that
        do not pay will be left out.

        That depends on how much chances vary, so it is counted on the drafts that were made last.

        Args:
            others: chances of drafts of other requests: they keep a run of luck from deciding.
            prices: [n] tokens that verifying the first, second, ... draft has to bring.
        """
        drafts = list(self.recent) if others is self.recent else [*self.recent, *others]
        least = min(prices)
        tokens, rows = [0.0] * (len(prices) + 1), [0.0] * (len(prices) + 1)
        for chances in drafts:
            survival, total, gain, best = 1.0, 0.0, 0.0, 0.0
            best_tokens, best_rows, first = 0.0, 0, len(prices)
            for place, price in enumerate(prices):
                # What would have come after the drafts that were made is known on average only.
                survival *= chances[place] if place < len(chances) else self.accepted[place]
                if survival <= least:  # nor will any later one pay
                    first = place
                    break
                total += survival
                gain += survival - price
                if gain > best:
                    best, best_tokens, best_rows = gain, total, place + 1
                tokens[place + 1] += best_tokens
                rows[place + 1] += best_rows
            for place in range(first, len(prices)):
                tokens[place + 1] += best_tokens
                rows[place + 1] += best_rows
        return [x / len(drafts) for x in tokens], [x / len(drafts) for x in rows]

    def _weight(self, place: int) -> float:
        return max(self.slowest, 1 / (self.counts[place] + 1))

    @classmethod
    def _from(cls, accepted: list[float], verified: list[float], slowest: float) -> Yield:
        counts = [float(PRIOR_STEPS)] * len(accepted)
        return cls(accepted, verified, counts, slowest, 0)


def _sums(rates: list[float]) -> list[float]:
    """Expected number of successes in a row among the first 0..n."""
    return list(accumulate(accumulate(rates, mul), initial=0.0))
