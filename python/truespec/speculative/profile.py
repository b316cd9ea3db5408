"""Measures what steps and drafts cost on this machine, with requests made up for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

from truespec.batch import Batch, ReqChunk
from truespec.core import Req
from truespec.params import SamplingParams
from truespec.speculative.base import SpecWorker
from truespec.speculative.planner import CostTable, StepCosts

ROW_SIZES = (1, 2, 4, 8, 16, 32)
BLOCK_SIZES = (1, 4, 16)
TYPICAL_DRAFTS = 3  # of a block: more are seldom worth verifying
PROMPT = 3  # tokens of a made-up request: little to prefill
BUDGET_SECONDS = 1.0  # per table, after its first two sizes
ROUNDS, REPEATS = 3, 3  # the fastest counts: everything else is noise


def measure_costs(worker: SpecWorker) -> StepCosts:
    """Run steps of several sizes and take the fastest of each.

    The worker must not have requests. Sizes that do not fit into its cache, and the largest ones
    on a machine too slow or too busy for them, are left out.
    """
    rows = _table(ROW_SIZES, lambda n: _step_seconds(worker, n, drafts=False))
    blocks = _table(BLOCK_SIZES, lambda n: _step_seconds(worker, n, drafts=True))
    return StepCosts(rows, blocks)


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


def _step_seconds(worker: SpecWorker, count: int, *, drafts: bool) -> float | None:
    """Seconds to draft for `count` requests, or to run `count` plain decodes."""
    reqs = _admit(worker, count)
    if len(reqs) < count:
        _release(worker, reqs)
        return None
    prefill = Batch([ReqChunk(req, 0, PROMPT - 1, samples=False, max_drafts=0) for req in reqs])
    worker.step(prefill)
    num_drafts = min(worker.num_drafts, TYPICAL_DRAFTS) if drafts else 0
    decode = Batch([ReqChunk(req, PROMPT - 1, 1, True, num_drafts) for req in reqs])
    work = worker.plan_and_draft if drafts else worker.step
    best = min(_seconds(lambda: work(decode)) for _ in range(REPEATS))
    _release(worker, reqs)
    return best


def _admit(worker: SpecWorker, count: int) -> list[Req]:
    reqs = []
    for index in range(count):
        ids = [1 + (index + i) % (worker.info.vocab_size - 1) for i in range(PROMPT)]
        params = SamplingParams(temperature=0.0, seed=0)
        req = Req(f"profile-{index}", ids, params, stop_ids=frozenset())
        room = PROMPT + worker.num_draft_slots
        if not worker.cache.try_admit(req, max_hit=0, num_tokens=room):
            break
        reqs.append(req)
    return reqs


def _release(worker: SpecWorker, reqs: list[Req]) -> None:
    for req in reqs:
        worker.forget(req)
        worker.cache.release(req, keep=False)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
