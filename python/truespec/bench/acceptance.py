"""Accepted lengths from records, by category and position. Pure functions of generations.

The accepted length of a step counts the bonus token (DSpark, arXiv 2607.05147: tau).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from truespec.core import TokenRecord

NGRAM = 4  # a token that completes a repeated 4-gram belongs to a loop


@dataclass(slots=True)
class AcceptedLengths:
    """Counts over speculative steps.

    Attributes:
        num_steps, num_tokens: steps that verified drafts, and tokens they emitted.
        verified, accepted: [position] drafts at that place whose predecessors were accepted, and
            how many of them were accepted.
        num_fresh_steps, num_fresh_tokens: the same for steps outside of loops.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_fresh_steps: int = 0
    num_fresh_tokens: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Tokens per step, bonus included; nan without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else float("nan")

    @property
    def fresh_mean(self) -> float:
        """The same without the steps that began by repeating a 4-gram of their own output."""
        if not self.num_fresh_steps:
            return float("nan")
        return self.num_fresh_tokens / self.num_fresh_steps

    @property
    def conditional(self) -> list[float]:
        """[position] share accepted of the drafts whose predecessors were accepted."""
        return [a / v if v else 0.0 for a, v in zip(self.accepted, self.verified, strict=True)]

    def add_output(self, records: Sequence[TokenRecord]) -> None:
        """Count a request's steps."""
        ids = [record.token_id for record in records]
        seen: set[tuple[int, ...]] = set()
        counted = 0
        for start, step in _steps(records):
            while counted < start:  # 4-grams that end before this step
                seen.add(tuple(ids[max(0, counted - NGRAM + 1) : counted + 1]))
                counted += 1
            gram = tuple(ids[max(0, start - NGRAM + 1) : start + 1])
            self._add_step(step, fresh=len(gram) < NGRAM or gram not in seen)

    def _add_step(self, step: Sequence[TokenRecord], *, fresh: bool) -> None:
        num_drafts = step[0].num_drafts
        if num_drafts == 0:
            return
        self.num_steps += 1
        self.num_tokens += len(step)
        if fresh:
            self.num_fresh_steps += 1
            self.num_fresh_tokens += len(step)
        num_accepted = sum(record.origin == "draft" for record in step)
        missing = num_drafts - len(self.verified)
        self.verified += [0] * missing
        self.accepted += [0] * missing
        for position in range(min(num_drafts, num_accepted + 1)):
            self.verified[position] += 1
            self.accepted[position] += position < num_accepted


def accepted_lengths(outputs: Iterable[Sequence[TokenRecord]]) -> AcceptedLengths:
    """Counts over the outputs of several requests."""
    total = AcceptedLengths()
    for records in outputs:
        total.add_output(records)
    return total


def _steps(records: Sequence[TokenRecord]) -> Iterable[tuple[int, Sequence[TokenRecord]]]:
    """(index of the first record, records) of each whole step.

    The last step of an output may be cut at a limit; it is left out, it says nothing of the draft.
    """
    starts = [i for i, record in enumerate(records) if record.position == 0]
    for start, end in pairwise(starts):
        yield start, records[start:end]
