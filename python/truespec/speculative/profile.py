"""Measures what steps and drafts cost on this machine, with requests made up for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from statistics import median_low

from truespec.batch import Batch, ReqChunk
from truespec.core import Req
from truespec.params import SamplingParams
from truespec.speculative.base import SpecWorker
from truespec.speculative.costs import CostTable, DraftCosts, StepCosts
from truespec.speculative.planner import Planner

ROW_SIZES = (1, 2, 4, 8, 16, 32)
BLOCK_SIZES = (1, 4, 16)  # numbers of requests for which drafting is measured
ROUNDS, REPEATS = 8, 2  # of a round the faster step counts
LARGE, LARGE_ROUNDS = 16, 2  # sizes that take most of the time are measured less often
BUDGET_SECONDS = 2.5
ALWAYS = 4  # the largest size that is measured whatever it takes
PROMPT = 2  # tokens of a made-up request: little to prefill


def measure_costs(worker: SpecWorker) -> StepCosts:
    """Run steps and drafts of several sizes, by turns so that a busy moment spoils no size.

    Of every size the median over the rounds counts, since plans compare typical steps: the fastest
    step of one row is a lucky one, which memory did not hold up. The worker must not have requests.
    Sizes that do not fit into its cache, and the largest ones on a machine too slow or too busy for
    them, are left out.
    """
    planner = worker.planner
    worker.planner = _AsAsked(planner.num_drafts, StepCosts(CostTable([], []), DraftCosts([], [])))
    most = worker.num_drafts
    lengths = [most] if planner.is_whole else sorted({1, (most + 1) // 2, most})
    found: dict[int, dict[int, list[float]]] = {num_drafts: {} for num_drafts in (0, *lengths)}
    end = time.perf_counter() + BUDGET_SECONDS
    for index in range(ROUNDS):
        for size in ROW_SIZES if index < LARGE_ROUNDS else ROW_SIZES[: ROW_SIZES.index(LARGE)]:
            if (index or size > ALWAYS) and time.perf_counter() > end:
                break
            measured = _measure(worker, size, lengths if size in BLOCK_SIZES else [])
            for num_drafts, seconds in measured.items():
                found[num_drafts].setdefault(size, []).append(seconds)
    worker.planner = planner
    return StepCosts(_table(found[0]), DraftCosts(lengths, [_table(found[n]) for n in lengths]))


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


def _table(rounds: dict[int, list[float]]) -> CostTable:
    """From the seconds of every round by size, sizes ascending."""
    typical = [median_low(seconds) for seconds in rounds.values()]
    # A smaller size never costs more than a larger one; where it seems to, something else ran.
    return CostTable(list(rounds), list(accumulate(reversed(typical), min))[::-1])


def _measure(worker: SpecWorker, count: int, lengths: list[int]) -> dict[int, float]:
    """Seconds to draft so much for `count` requests, by length; 0: a step of so many decodes.

    Empty where the cache has no room for them.
    """
    num_steps = max(REPEATS, len(lengths))
    reqs = _admit(worker, count, num_steps)
    measured: dict[int, float] = {}
    if len(reqs) == count:
        worker.step(Batch([ReqChunk(req, 0, PROMPT - 1, False, max_drafts=0) for req in reqs]))
        for req in reqs:
            req.num_computed = PROMPT - 1
        steps = []
        for index in range(num_steps):
            steps.append(_seconds(partial(_decode, worker, reqs)))
            if lengths:  # now a position of each request waits for its draft KV
                length = lengths[index % len(lengths)]
                seconds = _seconds(partial(worker.plan_and_draft, _batch(reqs, length)))
                measured[length] = min(seconds, measured.get(length, seconds))
        measured[0] = min(steps[:REPEATS])
    _release(worker, reqs)
    return measured


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _batch(reqs: list[Req], num_drafts: int) -> Batch:
    return Batch([ReqChunk(req, req.num_computed, 1, True, num_drafts) for req in reqs])


def _decode(worker: SpecWorker, reqs: list[Req]) -> None:
    """One step without drafts."""
    for req, token_ids in zip(reqs, worker.step(_batch(reqs, 0)).token_ids, strict=True):
        req.num_computed += 1
        req.output_ids += token_ids or [req.last_token_id]


def _admit(worker: SpecWorker, count: int, num_steps: int) -> list[Req]:
    """So many requests with room for the steps, or as many as fit."""
    reqs = []
    for index in range(count):
        ids = [1 + (index + i) % (worker.info.vocab_size - 1) for i in range(PROMPT)]
        params = SamplingParams(temperature=0.0, seed=0)
        req = Req(f"profile-{index}", ids[:-1], params, stop_ids=frozenset(), output_ids=ids[-1:])
        room = PROMPT + num_steps + worker.num_draft_slots
        if not worker.cache.try_admit(req, max_hit=0, num_tokens=room):
            break
        reqs.append(req)
    return reqs


def _release(worker: SpecWorker, reqs: list[Req]) -> None:
    for req in reqs:
        worker.forget(req)
        worker.cache.release(req, keep=False)
