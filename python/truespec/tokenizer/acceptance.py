"""Counts of speculative steps, made from kept records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from truespec.core import TokenRecord


@dataclass(slots=True)
class Acceptance:
    """What speculation did for the tokens that were kept.

    A step counts when it verified at least one draft; it begins at the record with position 0.

    Attributes:
        num_steps: such steps.
        num_drafts: drafts they verified.
        num_accepted: accepted drafts that were kept.
        num_tokens: kept tokens of these steps, accepted drafts and the target's own.
        histogram: [max drafts + 1] steps by number of accepted drafts kept.
        per_position: [max drafts] accepted drafts by their place in the draft.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])
    per_position: list[int] = field(default_factory=list)
    _in_step: int = 0

    def add(self, record: TokenRecord) -> None:
        """Count one kept record; records come in order."""
        if record.num_drafts == 0:
            return
        self.num_tokens += 1
        if record.position == 0:
            self._begin_step(record.num_drafts)
        if record.origin == "draft":
            self.num_accepted += 1
            self.per_position[record.position] += 1
            self.histogram[self._in_step] -= 1
            self._in_step += 1
            self.histogram[self._in_step] += 1

    def _begin_step(self, num_drafts: int) -> None:
        self.num_steps += 1
        self.num_drafts += num_drafts
        self._in_step = 0
        missing = num_drafts - len(self.per_position)
        if missing > 0:
            self.per_position.extend([0] * missing)
            self.histogram.extend([0] * missing)
        self.histogram[0] += 1

    @property
    def mean_length(self) -> float:
        """Kept tokens per step, 0.0 without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def rate(self) -> float:
        """Accepted share of the verified drafts, 0.0 without drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    def padded_histogram(self, num_drafts: int) -> list[int]:
        """`histogram` with at least `num_drafts + 1` entries, a new list."""
        return self.histogram + [0] * (num_drafts + 1 - len(self.histogram))


def acceptance_of(records: Iterable[TokenRecord]) -> Acceptance:
    """Counts of a whole list of records."""
    counts = Acceptance()
    for record in records:
        counts.add(record)
    return counts


def joined(parts: Sequence[Acceptance]) -> Acceptance:
    """The sum of several requests' counts."""
    total = Acceptance()
    for part in parts:
        total.num_steps += part.num_steps
        total.num_drafts += part.num_drafts
        total.num_accepted += part.num_accepted
        total.num_tokens += part.num_tokens
        total.histogram = _summed(total.histogram, part.histogram)
        total.per_position = _summed(total.per_position, part.per_position)
    return total


def _summed(a: list[int], b: list[int]) -> list[int]:
    short, long = sorted((a, b), key=len)
    return [x + y for x, y in zip(short, long, strict=False)] + long[len(short) :]
