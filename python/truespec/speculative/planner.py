"""How many drafts are worth verifying: from what steps cost and from what was accepted so far.

Costs are measured at start and corrected while serving.

Under coupled verification any schedule leaves the output unchanged, so the plan may look at
everything. Symbols of DSpark (arXiv 2607.05147, section 3.4): a_j the survival of draft j (the
probability that it and all before it are accepted), B rows of the step, tau expected tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

AVERAGING = 0.97  # weight of the past in the running acceptance
FIRST_ACCEPTANCE = 0.7  # before anything is known: drafting is tried
PROBE_STEPS = 32  # steps without drafts before one is tried again
MAX_PROBE_STEPS = 512
PROBE_LENGTH = 2  # drafts of such a try
PROBE_EVERY = 4  # it takes every fourth request, in turn
MIN_GAIN = 1.08  # predicted gain below which drafts are left out: estimates are noisy
LEARNING = 0.1  # weight of a new measurement
REQUEST_LEARNING = 0.15  # weight of a step in what is known of a request
OVERALL_LEARNING = 0.02  # and of all requests, where a new one starts
OUTLIER = 2.0  # a measurement counts as at most so many times what was expected


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

    def learn(self, size: int, seconds: float) -> None:
        """Move towards a measurement made while serving."""
        known = self._measured(size)
        if known > 0:
            now = min(seconds / known, OUTLIER * self.scale)
            self.scale += LEARNING * (now - self.scale)

    def at(self, size: int) -> float:
        """Seconds for `size`; 0 is free."""
        return self.scale * self._measured(size)

    def _measured(self, size: int) -> float:
        if size == 0 or not self.sizes:
            return 0.0
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.seconds[0]
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.sizes[right] - self.sizes[left])
        return self.seconds[left] + slope * (size - self.sizes[left])


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured costs of this machine.

    Attributes:
        rows: a target step by its rows (forward, head and sampling).
        blocks: drafting by the number of requests drafted for.
    """

    rows: CostTable
    blocks: CostTable


@dataclass(slots=True)
class Yield:
    """What drafting for a request brings, running means per step.

    Attributes:
        accepted: drafts accepted. verified: rows spent on them.
    """

    accepted: float
    verified: float

    def learn(self, accepted: int, verified: int, weight: float) -> None:
        """Move towards what a step brought."""
        self.accepted += weight * (accepted - self.accepted)
        self.verified += weight * (verified - self.verified)


@dataclass(slots=True)
class Planner:
    """Chooses draft lengths step by step.

    Where drafts are trimmed by their confidences, what gets verified is a choice of the best ones,
    so it is decided per request from what drafting really brought. Otherwise one length for all
    follows from the acceptance by position.

    Args:
        num_drafts: drafts per request at most.
        costs: `None` drafts as much as it may.
        trims: the worker calls `trim` on what it made.

    Attributes:
        acceptance: [num_drafts] running conditional acceptance by position.
    """

    num_drafts: int
    costs: StepCosts | None
    trims: bool = False
    acceptance: list[float] = field(default_factory=list)
    _overall: Yield = field(default_factory=lambda: Yield(FIRST_ACCEPTANCE, 1.0))
    _yields: dict[str, Yield] = field(default_factory=dict)
    _idle_steps: int = 0
    _num_probes: int = -1
    _probe_after: int = PROBE_STEPS

    def __post_init__(self) -> None:
        self.acceptance = [FIRST_ACCEPTANCE] * self.num_drafts

    def counts(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        """Drafts to make per decoding request.

        Args:
            rids: its requests. caps: what each of them may have.
            other_rows: prompt rows in the same step.
        """
        if self.costs is None or not any(caps):
            return caps
        best = (
            self._chosen(rids, caps, other_rows) if self.trims else self._length(caps, other_rows)
        )
        if not any(best):
            return self._idle_or_probe(caps)
        self._idle_steps, self._probe_after = 0, PROBE_STEPS
        return best

    def forget(self, rid: str) -> None:
        """The request is over."""
        self._yields.pop(rid, None)

    def _chosen(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        """Drafts for the requests where they bring most, as many as raise tokens per second."""
        assert self.costs is not None, "without costs nothing is planned"
        base_rows = len(caps) + other_rows
        yields = [self._yields.get(rid, self._overall) for rid in rids]
        order = sorted((i for i, cap in enumerate(caps) if cap), key=lambda i: -yields[i].accepted)
        tokens, rows = float(len(caps)), float(base_rows)
        best, num_best = tokens / self.costs.rows.at(base_rows) * MIN_GAIN, 0
        for num_blocks, index in enumerate(order, start=1):
            tokens += yields[index].accepted
            rows += yields[index].verified
            seconds = self.costs.rows.at(round(rows)) + self.costs.blocks.at(num_blocks)
            if tokens / seconds > best:
                best, num_best = tokens / seconds, num_blocks
        counts = [0] * len(caps)
        for index in order[:num_best]:
            # One more than is usually worth verifying, so that the length can grow.
            counts[index] = min(caps[index], round(yields[index].verified) + 1)
        return counts

    def _length(self, caps: list[int], other_rows: int) -> list[int]:
        """One length for all requests."""
        assert self.costs is not None, "without costs nothing is planned"
        base_rows = len(caps) + other_rows
        num_blocks = sum(cap > 0 for cap in caps)
        survivals = self._survivals()
        best, best_length = len(caps) / self.costs.rows.at(base_rows) * MIN_GAIN, 0
        for length in range(1, self.num_drafts + 1):
            taken = [min(cap, length) for cap in caps]
            tokens = len(caps) + sum(sum(survivals[:count]) for count in taken)
            seconds = self.costs.rows.at(base_rows + sum(taken)) + self.costs.blocks.at(num_blocks)
            if tokens / seconds > best:
                best, best_length = tokens / seconds, length
        return [min(cap, best_length) for cap in caps]

    def trim(self, survivals: list[list[float]], other_rows: int) -> list[int]:
        """Drafts to verify per request once they are made (their cost is spent).

        Rows are admitted by falling survival, equal ones by position and then request, until the
        expected tokens per second fall.

        Args:
            survivals: a_j of each draft by request, falling along j.
            other_rows: rows of the step that are run anyway.
        """
        if self.costs is None:
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
        self, *, num_rows: int, seconds: float, num_blocks: int, draft_seconds: float
    ) -> None:
        """Learn from a step without prompt rows: what it took to draft, and all the rest."""
        if self.costs is None:
            return
        self.costs.rows.learn(num_rows, seconds)
        if num_blocks:
            self.costs.blocks.learn(num_blocks, draft_seconds)

    def observe(self, rid: str, num_drafts: int, num_accepted: int) -> None:
        """Learn from a step that drafted for a request: drafts verified, and accepted of them."""
        if rid not in self._yields:
            self._yields[rid] = Yield(self._overall.accepted, self._overall.verified)
        self._yields[rid].learn(num_accepted, num_drafts, REQUEST_LEARNING)
        self._overall.learn(num_accepted, num_drafts, OVERALL_LEARNING)
        for position in range(min(num_drafts, num_accepted + 1)):
            hit = 1.0 if position < num_accepted else 0.0
            known = self.acceptance[position]
            self.acceptance[position] = known * AVERAGING + hit * (1.0 - AVERAGING)

    def _survivals(self) -> list[float]:
        survivals, product = [], 1.0
        for rate in self.acceptance:
            product *= rate
            survivals.append(product)
        return survivals

    def _idle_or_probe(self, caps: list[int]) -> list[int]:
        """No drafts, but now and then for some requests, rarer each time it does not pay."""
        self._idle_steps += 1
        if self._idle_steps <= self._probe_after:
            return [0] * len(caps)
        self._idle_steps = 0
        self._num_probes += 1
        self._probe_after = min(self._probe_after * 2, MAX_PROBE_STEPS)
        every = min(PROBE_EVERY, len(caps))
        return [
            min(cap, PROBE_LENGTH) if (index - self._num_probes) % every == 0 else 0
            for index, cap in enumerate(caps)
        ]
