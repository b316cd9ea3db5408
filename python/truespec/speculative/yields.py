"""What drafting brings: how far drafts get verified and accepted, by their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

FIRST_RATE = 0.7  # before anything is known: drafting is tried
PRIOR_STEPS = 3  # steps that what is known of all requests counts for with a new one
REQUEST_LEARNING = 0.1  # weight of a step in what is known of a request, in the long run
OVERALL_LEARNING = 0.02  # and of all requests
TRUST = 0.5  # what the chance of a verified draft counts beside what came of it


@dataclass(slots=True)
class Yield:
    """Running rates of drafting, by position in the draft.

    Attributes:
        accepted: [n] how often a draft is accepted if all before it are.
        verified: [n] how often one is verified if all before it are.
        counts: [n] drafts that `accepted` knows of.
        slowest: weight of a new step in the long run.
        num_steps: steps learnt from.
    """

    accepted: list[float]
    verified: list[float]
    counts: list[float]
    slowest: float
    num_steps: int

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

    def _weight(self, place: int) -> float:
        return max(self.slowest, 1 / (self.counts[place] + 1))

    @classmethod
    def _from(cls, accepted: list[float], verified: list[float], slowest: float) -> Yield:
        counts = [float(PRIOR_STEPS)] * len(accepted)
        return cls(accepted, verified, counts, slowest, 0)


def _sums(rates: list[float]) -> list[float]:
    """Expected number of successes in a row among the first 0..n."""
    return list(accumulate(accumulate(rates, mul), initial=0.0))
