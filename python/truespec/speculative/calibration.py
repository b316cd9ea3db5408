"""How likely a draft is to be accepted, from what its drafter says of it. Learnt while serving.

A drafter's own probability of its token tells most (area under the ROC curve 0.78 to 0.83 for the
shipped DSpark at temperature 0, where a confidence head that does not see the token has 0.61 to
0.72), but is right only for a drafter that was trained for the texts at hand and for the
temperature: hence a logistic regression on the log-odds of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

MAX_LOG_ODDS = 6.0
PRIOR_VARIANCE = 0.02  # of each weight: what some hundred drafts outweigh
MEMORY = 2000  # drafts after which old ones are forgotten as fast as new ones come
SPREAD_LEARNING = 0.01


class Signs(NamedTuple):
    """Of one draft: 1, log-odds of its own probability, and of the drafter's confidence or 0."""

    constant: float
    own: float
    confidence: float


def signs(logprob: float, confidence: float | None) -> Signs:
    """Of a draft with this logprob under the drafter, and this confidence where it has any."""
    return Signs(1.0, _log_odds(exp(logprob)), 0.0 if confidence is None else _log_odds(confidence))


@dataclass(slots=True)
class Calibration:
    """Of the drafts of some kind.

    Attributes:
        weights: of the three signs.
        sure, unsure: mean chance of the drafts more and less likely than not.
    """

    weights: list[float] = field(default_factory=lambda: [0.0, 1.0, 0.0])
    sure: float = 0.85
    unsure: float = 0.25
    _covariance: list[list[float]] = field(
        default_factory=lambda: [
            [PRIOR_VARIANCE * (row == column) for column in range(3)] for row in range(3)
        ]
    )
    _num_drafts: int = 0

    def chance(self, x: Signs) -> float:
        """Probability that a draft is accepted if all before it are."""
        a, b, c = self.weights
        score = a + b * x.own + c * x.confidence
        return 1.0 / (1.0 + exp(-max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, score))))

    def expect(self, x: Signs) -> float:
        """As `chance`, of a draft that was just made."""
        chance = self.chance(x)
        if chance >= 0.5:
            self.sure += SPREAD_LEARNING * (chance - self.sure)
        else:
            self.unsure += SPREAD_LEARNING * (chance - self.unsure)
        return chance

    def learn(self, x: Signs, accepted: bool) -> None:
        """From a draft that was verified, all before it being accepted: a step of online Newton."""
        chance = self.chance(x)
        moved = [_dot(row, x) for row in self._covariance]
        variance = chance * (1.0 - chance)
        scale = 1.0 + variance * _dot(moved, x)
        self._num_drafts += 1
        fade = 1.0 + 1.0 / MEMORY if self._num_drafts > MEMORY else 1.0
        for i in range(3):
            self.weights[i] += moved[i] * (accepted - chance) / scale
            for j in range(3):
                self._covariance[i][j] -= moved[i] * moved[j] * variance / scale
        if all(self._covariance[i][i] * fade <= PRIOR_VARIANCE for i in range(3)):
            self._covariance = [[value * fade for value in row] for row in self._covariance]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _log_odds(probability: float) -> float:
    if probability <= 0.0:
        return -MAX_LOG_ODDS
    if probability >= 1.0:
        return MAX_LOG_ODDS
    return max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, log(probability / (1.0 - probability))))
