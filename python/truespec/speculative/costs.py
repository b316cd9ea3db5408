"""What steps and drafts cost on this machine: measured at start, corrected while serving."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LEARNING = 0.02  # part by which a measurement moves a scale
FIRST_STEP, LAST_STEP = 0.25, 0.003  # of a point's factor, by how often it was seen
FEW = 8  # times that a point must be seen for its factor to last
FADING = 0.001  # part by which another factor returns to 1 with every measurement elsewhere
MIN_FACTOR, MAX_FACTOR = 0.5, 2.0


@dataclass(slots=True)
class CostTable:
    """Seconds by size, linear between the measured points and beyond the last two.

    What is learnt while serving scales the whole table: a busy machine or long contexts make every
    size slower, and most sizes are seldom seen. But a point that was measured in a busy moment
    would stay wrong for ever (if it says that drafts are dear, none are made), so each point also
    has a factor, which takes large steps at first and small ones later: a wrong point is put right
    within some twenty steps of its size, and noise averages out. What a few steps said of a size
    that is not tried again since then fades: it may be they that came in a busy moment. Scale and
    factors cannot drift against each other: the point seen most often has none, it is the yardstick
    of the scale.

    Attributes:
        sizes: ascending. seconds: one per size, as measured at start.
        scale: how much slower than at start.
        factors: of the seconds, one per size.
    """

    sizes: list[int]
    seconds: list[float]
    scale: float = 1.0
    factors: list[float] = field(init=False)
    _counts: list[float] = field(init=False)
    _known: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.factors = [1.0] * len(self.sizes)
        self._counts = [0.0] * len(self.sizes)

    def learn(self, size: int, seconds: float) -> None:
        """Move towards a measurement made while serving."""
        if self.at(size) <= 0:
            return
        sign = 1 if seconds > self.at(size) else -1
        near = self._near(size)
        for index, share in near:
            self._counts[index] += share
        yardstick = max(range(len(self.sizes)), key=self._counts.__getitem__)
        self._rebase(yardstick)
        self.scale *= 1 + sign * LEARNING
        for index, count in enumerate(self._counts):
            if count < FEW:
                self.factors[index] += FADING * (1.0 - self.factors[index])
        for index, share in near:
            if index != yardstick:
                step = share * max(LAST_STEP, FIRST_STEP / (1 + self._counts[index]))
                moved = self.factors[index] * (1 + sign * step)
                self.factors[index] = min(max(moved, MIN_FACTOR), MAX_FACTOR)
        self._known.clear()

    def at(self, size: int) -> float:
        """Seconds for `size`; 0 is free."""
        return self.scale * self.unscaled(size)

    def unscaled(self, size: int) -> float:
        """Seconds for `size` if the machine were as fast as at start."""
        if size not in self._known:
            self._known[size] = self._between(size)
        return self._known[size]

    def _rebase(self, yardstick: int) -> None:
        """Take the factor of a point into the scale; points never seen go with the scale."""
        factor = self.factors[yardstick]
        self.scale *= factor
        self.factors = [
            own / factor if count else 1.0
            for own, count in zip(self.factors, self._counts, strict=True)
        ]

    def _near(self, size: int) -> list[tuple[int, float]]:
        """The measured points that decide on `size`, with their shares in it."""
        right = bisect_left(self.sizes, size)
        if right == 0 or right == len(self.sizes):
            return [(max(right - 1, 0), 1.0)]
        share = (size - self.sizes[right - 1]) / (self.sizes[right] - self.sizes[right - 1])
        return [(index, part) for index, part in ((right - 1, 1 - share), (right, share)) if part]

    def _between(self, size: int) -> float:
        if size == 0 or not self.sizes:
            return 0.0
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        high = self.factors[right] * self.seconds[right]
        if right == 0:
            return high
        low = self.factors[right - 1] * self.seconds[right - 1]
        slope = (high - low) / (self.sizes[right] - self.sizes[right - 1])
        if size > self.sizes[right]:  # factors may make the last point the cheaper one
            return high + max(slope, 0.0) * (size - self.sizes[right])
        return low + slope * (size - self.sizes[right - 1])


@dataclass(slots=True)
class DraftCosts:
    """Seconds of drafting, by the number of requests and the longest of their drafts.

    Attributes:
        lengths: ascending. tables: one per length, by the number of requests.
        scale: how much slower than at start.
    """

    lengths: list[int]
    tables: list[CostTable]
    scale: float = 1.0
    _count: int = 0
    _by_length: dict[int, CostTable] = field(default_factory=dict)

    def learn(self, num_reqs: int, length: int, seconds: float) -> None:
        """Move towards a measurement made while serving, by large steps at first.

        The size of a step does not depend on the measurement, so the scale follows the median: a
        mean would follow the odd moments of a busy machine, which weigh most in short drafts.
        """
        expected = self.at(num_reqs, length)
        if expected > 0:
            self._count += 1
            step = max(LEARNING, FIRST_STEP / (1 + self._count))
            self.scale *= 1 + step if seconds > expected else 1 - step

    def at(self, num_reqs: int, length: int) -> float:
        """Seconds to draft `length` tokens for so many requests."""
        return self.scale * self._measured(num_reqs, length)

    def _measured(self, num_reqs: int, length: int) -> float:
        if num_reqs not in self._by_length:
            seconds = [table.unscaled(num_reqs) for table in self.tables]
            self._by_length[num_reqs] = CostTable(self.lengths, seconds)
        return self._by_length[num_reqs].unscaled(length)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured costs of this machine.

    Attributes:
        rows: a target step by its rows (forward, head and sampling).
        drafts: drafting.
    """

    rows: CostTable
    drafts: DraftCosts
