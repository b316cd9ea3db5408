"""What steps and drafts cost on this machine: measured at start, corrected while serving."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LEARNING = 0.02  # part by which a measurement moves what is known


@dataclass(slots=True)
class CostTable:
    """Seconds by size, linear between the measured points and beyond the last two.

    What is learnt while serving scales the whole table: a busy machine or long contexts make every
    size slower, and sizes measured at different times would not compare.

    Attributes:
        sizes: ascending. seconds: one per size.
        scale: how much slower than at start.
    """

    sizes: list[int]
    seconds: list[float]
    scale: float = 1.0
    _known: dict[int, float] = field(default_factory=dict)

    def learn(self, size: int, seconds: float) -> None:
        """Move towards a measurement made while serving."""
        self.scale = _moved(self.scale, seconds, self.measured(size))

    def at(self, size: int) -> float:
        """Seconds for `size`; 0 is free."""
        return self.scale * self.measured(size)

    def measured(self, size: int) -> float:
        """Seconds for `size` at start."""
        if size not in self._known:
            self._known[size] = self._between(size)
        return self._known[size]

    def _between(self, size: int) -> float:
        if size == 0 or not self.sizes:
            return 0.0
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.seconds[0]
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.sizes[right] - self.sizes[left])
        return self.seconds[left] + slope * (size - self.sizes[left])


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
    _by_length: dict[int, CostTable] = field(default_factory=dict)

    def learn(self, num_reqs: int, length: int, seconds: float) -> None:
        """Move towards a measurement made while serving."""
        self.scale = _moved(self.scale, seconds, self._measured(num_reqs, length))

    def at(self, num_reqs: int, length: int) -> float:
        """Seconds to draft `length` tokens for so many requests."""
        return self.scale * self._measured(num_reqs, length)

    def _measured(self, num_reqs: int, length: int) -> float:
        if num_reqs not in self._by_length:
            seconds = [table.measured(num_reqs) for table in self.tables]
            self._by_length[num_reqs] = CostTable(self.lengths, seconds)
        return self._by_length[num_reqs].measured(length)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured costs of this machine.

    Attributes:
        rows: a target step by its rows (forward, head and sampling).
        drafts: drafting.
    """

    rows: CostTable
    drafts: DraftCosts


def _moved(scale: float, seconds: float, measured: float) -> float:
    """`scale` after a measurement of what took `measured` at start.

    It takes a step of one size towards every measurement, so it follows their median: a mean would
    follow the odd moments of a busy machine, which are long and weigh most in short drafts.
    """
    if measured <= 0:
        return scale
    return scale * (1 + LEARNING if seconds > scale * measured else 1 - LEARNING)
