"""Measures what steps and drafts cost on this machine, with requests made up for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate

from truespec.batch import Batch, ReqChunk
from truespec.core import Req
from truespec.params import SamplingParams
from truespec.speculative.base import SpecWorker
from truespec.speculative.costs import CostTable, DraftCosts, StepCosts
from truespec.speculative.planner import Planner

ROW_SIZES = (1, 2, 4, 8, 16, 32)
BLOCK_SIZES = (1, 4, 16)
PROMPT = 3  # tokens of a made-up request: little to prefill
BUDGET_SECONDS = 1.0  # per table, after its first two sizes
ROUNDS, REPEATS = 3, 3  # the fastest counts: everything else is noise


def measure_costs(worker: SpecWorker) -> StepCosts:
    """Run steps of several sizes and take the fastest of each.

    The worker must not have requests. Sizes that do not fit into its cache, and the largest ones
    on a machine too slow or too busy for them, are left out.
    """
    planner = worker.planner
    worker.planner = _AsAsked(planner.num_drafts, StepCosts(CostTable([], []), DraftCosts([], [])))
    rows = _table(ROW_SIZES, partial(_measure, worker, 0))
    most = worker.num_drafts
    lengths = [most] if planner.is_whole else sorted({1, (most + 1) // 2, most})
    tables = [_table(BLOCK_SIZES, partial(_measure, worker, length)) for length in lengths]
    worker.planner = planner
    return StepCosts(rows, DraftCosts(lengths, tables))


class _AsAsked(Planner):
    """Drafts and verifies whatever is allowed, and learns nothing."""

    def counts(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        return caps

    def trim(self, survivals: list[list[float]], other_rows: int) -> list[int]:
        return [len(values) for values in survivals]

    def learn_costs(
        self,
        *,
        num_rows: int,
        seconds: float,
        counts: list[int],
        draft_seconds: float,
        is_typical: bool = True,
    ) -> None:
        """Nothing."""


def _table(sizes: tuple[int, ...], measure: Callable[[int], float | None]) -> CostTable:
    """The fastest of each size over several rounds, so that a busy moment spoils no size."""
    found: dict[int, float] = {}
    begin = time.perf_counter()
    for size in sizes * ROUNDS:
        if len(found) >= 2 and time.perf_counter() - begin > BUDGET_SECONDS:
            break
        measured = measure(size)
        if measured is not None:
            found[size] = min(measured, found.get(size, measured))
    # A smaller size never costs more than a larger one; where it seems to, something else ran.
    seconds = list(accumulate(reversed(found.values()), min))[::-1]
    return CostTable(list(found), seconds)


def _measure(worker: SpecWorker, num_drafts: int, count: int) -> float | None:
    """Seconds to draft so much for `count` requests, or without drafts, of so many decodes."""
    reqs = _admit(worker, count)
    if len(reqs) < count:
        _release(worker, reqs)
        return None
    worker.step(Batch([ReqChunk(req, 0, PROMPT - 1, False, max_drafts=0) for req in reqs]))
    for req in reqs:
        req.num_computed = PROMPT - 1
    measured = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        _decode(worker, reqs)
        if num_drafts:  # now a position of each request waits for its draft KV
            start = time.perf_counter()
            worker.plan_and_draft(_batch(reqs, num_drafts))
        measured.append(time.perf_counter() - start)
    _release(worker, reqs)
    return min(measured)


def _batch(reqs: list[Req], num_drafts: int) -> Batch:
    return Batch([ReqChunk(req, req.num_computed, 1, True, num_drafts) for req in reqs])


def _decode(worker: SpecWorker, reqs: list[Req]) -> None:
    """One step without drafts."""
    for req, token_ids in zip(reqs, worker.step(_batch(reqs, 0)).token_ids, strict=True):
        req.num_computed += 1
        req.output_ids += token_ids or [req.last_token_id]


def _admit(worker: SpecWorker, count: int) -> list[Req]:
    reqs = []
    for index in range(count):
        ids = [1 + (index + i) % (worker.info.vocab_size - 1) for i in range(PROMPT)]
        params = SamplingParams(temperature=0.0, seed=0)
        req = Req(f"profile-{index}", ids[:-1], params, stop_ids=frozenset(), output_ids=ids[-1:])
        room = PROMPT + REPEATS + worker.num_draft_slots
        if not worker.cache.try_admit(req, max_hit=0, num_tokens=room):
            break
        reqs.append(req)
    return reqs


def _release(worker: SpecWorker, reqs: list[Req]) -> None:
    for req in reqs:
        worker.forget(req)
        worker.cache.release(req, keep=False)
