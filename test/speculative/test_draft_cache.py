"""The draft cache: what is drafted after some tokens depends on these tokens alone.

Every draft that a busy engine makes is compared, token and logprob to the bit, with the first
draft of a fresh engine that is given the same tokens as its prompt. So whatever went before
(refused drafts, chunks, prefix hits, speculation off, retraction) has left the right draft KV.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from drafters import DRAFTERS, drafter_engine
from harness import VOCAB_SIZE, Engine, Job

from truespec.batch import Batch
from truespec.message import Abort, Submit
from truespec.params import SamplingParams
from truespec.speculative import drafter_worker
from truespec.speculative.contract import Draft
from truespec.speculative.planner import Planner

CACHED = [name for name in DRAFTERS if name not in ("ngram", "dspark threshold")]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)
FAMILY = "qwen3"
Tokens = tuple[int, ...]
Drafted = tuple[list[int], list[int], list[float]]  # ids, parents within the draft, logprobs


class Logger:
    """Notes every draft of an engine by the tokens it follows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.drafts: dict[Tokens, Drafted] = {}
        self._draft = engine.worker.draft
        engine.worker.draft = self._logged  # type: ignore[method-assign]  # this is the point

    def _logged(self, batch: Batch) -> Draft:
        draft = self._draft(batch)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        cu = draft.cu_rows.tolist()
        for chunk, begin, end in zip(sampling, cu, cu[1:], strict=False):
            if self.engine.worker.planned_drafts(chunk):
                parents = [p - begin for p in draft.parents[begin + 1 : end].tolist()]
                self.drafts[tuple(chunk.req.token_ids)] = (
                    draft.token_ids[begin + 1 : end].tolist(),
                    parents,
                    draft.logprobs[begin + 1 : end].tolist(),
                )
        return draft


def _first_draft(fresh: Logger, tokens: Tokens, count: int) -> Drafted:
    """What is drafted when `tokens` are a new prompt whose last one is decoded by itself."""
    scheduler = fresh.engine.scheduler
    scheduler._policy.max_prefill_rows = len(tokens) - 1
    params = replace(PARAMS, max_tokens=count + 2, num_draft_tokens=count)
    scheduler.submit(Submit("fresh", list(tokens), params))
    scheduler.step()
    scheduler.step()
    scheduler.abort(Abort("fresh"))
    return fresh.drafts[tokens]


def _prompts(count: int, length: int, shared: int) -> list[Tokens]:
    rng = random.Random(length)
    start = [rng.randrange(3, VOCAB_SIZE) for _ in range(shared)]
    return [
        tuple(start + [rng.randrange(3, VOCAB_SIZE) for _ in range(length - shared)])
        for _ in range(count)
    ]


@pytest.fixture(scope="module", params=CACHED)
def name(request: pytest.FixtureRequest) -> str:
    """One drafter after the other."""
    return str(request.param)


@pytest.fixture(scope="module")
def fresh(name: str) -> Logger:
    """An engine that starts every request from nothing."""
    return Logger(drafter_engine(name, FAMILY, prefix=False))


@dataclass(slots=True)
class Pausing(Planner):
    """Drafts for one request after the other, with steps without drafts in between."""

    pause: int = 1
    calls: int = 0

    def counts(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        self.calls += 1
        turn, rest = divmod(self.calls, self.pause + 1)
        return [
            cap if rest == 0 and index == turn % len(caps) else 0 for index, cap in enumerate(caps)
        ]


class Idle(Planner):
    """Finds no drafts worth their cost."""

    @property
    def pays(self) -> bool:
        return False

    def counts(self, rids: list[str], caps: list[int], other_rows: int) -> list[int]:
        return [0] * len(caps)


def _check(logger: Logger, fresh: Logger, *, at_least: int) -> None:
    assert len(logger.drafts) >= at_least, "the scenario did not draft"
    for tokens, drafted in logger.drafts.items():
        assert drafted[0], "no drafts were made"
        assert drafted == _first_draft(fresh, tokens, len(drafted[0]))


def test_refused_drafts_and_chunks_leave_no_trace(name: str, fresh: Logger) -> None:
    logger = Logger(drafter_engine(name, FAMILY, prefix=False, chunk=7))
    jobs = [Job(ids, PARAMS, arrival=i) for i, ids in enumerate(_prompts(3, 18, 0))]
    counts = [result.acceptance for result in logger.engine.run(jobs)]
    assert 0 < sum(c.num_accepted for c in counts) < sum(c.num_drafts for c in counts)
    _check(logger, fresh, at_least=6)


@pytest.mark.parametrize("pause", [1, 4])
def test_positions_that_waited_draft_as_if_they_had_not(
    name: str, fresh: Logger, pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests draft in some steps only; with room for few positions, or for all."""
    monkeypatch.setattr(drafter_worker, "MAX_HELD", 2 + pause)
    logger = Logger(drafter_engine(name, FAMILY, chunk=7))
    worker = logger.engine.worker
    worker.planner = Pausing(worker.num_drafts, costs=None, pause=pause)
    jobs = [Job(ids, PARAMS, arrival=2 * i) for i, ids in enumerate(_prompts(3, 18, 0))]
    logger.engine.run(jobs)
    _check(logger, fresh, at_least=3)


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("shared", [32, 33, 34, 36])
def test_a_prefix_hit_drafts_as_if_there_were_none(
    name: str, fresh: Logger, shared: int, speculative: bool
) -> None:
    """The prompts part at or just behind the end of a page; the first may not speculate."""
    logger = Logger(drafter_engine(name, FAMILY))
    first, second = _prompts(2, 40, shared)
    logger.engine.run([Job(first, replace(PARAMS, speculative=speculative, max_tokens=6))])
    logger.drafts.clear()
    (result,) = logger.engine.run([Job(second, replace(PARAMS, max_tokens=12))])
    lookahead = logger.engine.worker.cache.prefix._lookahead
    assert result.num_cached_tokens == (shared - lookahead) // 16 * 16
    _check(logger, fresh, at_least=1)


def test_a_prompt_that_goes_on_from_an_output_drafts_as_if_it_were_new(
    name: str, fresh: Logger
) -> None:
    logger = Logger(drafter_engine(name, FAMILY))
    (prompt,) = _prompts(1, 20, 0)
    (result,) = logger.engine.run([Job(prompt, replace(PARAMS, max_tokens=24))])
    logger.drafts.clear()
    longer = (*prompt, *result.token_ids)
    (again,) = logger.engine.run([Job(longer, PARAMS)])
    assert again.num_cached_tokens == 32
    _check(logger, fresh, at_least=1)


def test_a_retracted_request_drafts_as_before(name: str, fresh: Logger) -> None:
    logger = Logger(drafter_engine(name, FAMILY))
    scheduler, (prompt,) = logger.engine.scheduler, _prompts(1, 19, 0)
    scheduler.submit(Submit("a", list(prompt), PARAMS))
    for _ in range(3):
        scheduler.step()
    policy = scheduler._policy
    (req,) = policy.running
    policy._retract(req)
    logger.engine.worker.forget(req)
    logger.drafts.clear()
    while scheduler.has_work:
        scheduler.step()
    scheduler.check_idle()
    _check(logger, fresh, at_least=1)


def test_what_is_not_worth_keeping_up_is_never_drafted_on(name: str, fresh: Logger) -> None:
    """A conversation goes on after an answer that was not drafted for, beside a new request."""
    logger = Logger(drafter_engine(name, FAMILY))
    worker = logger.engine.worker
    first, other = _prompts(2, 40, 0)
    worker.planner = Idle(worker.num_drafts, costs=None)
    (answer,) = logger.engine.run([Job(first, replace(PARAMS, max_tokens=24))])
    worker.planner = Planner(worker.num_drafts, costs=None)
    follow_up = (*first, *answer.token_ids, 5, 6, 7)
    again, new = logger.engine.run([Job(follow_up, PARAMS), Job(other, PARAMS)])
    assert again.num_cached_tokens == 48
    assert again.acceptance.num_drafts == 0 < new.acceptance.num_drafts
    assert not any(tokens[: len(first)] == first for tokens in logger.drafts)
    _check(logger, fresh, at_least=1)


def test_a_request_that_waited_too_long_for_drafts_gets_none(
    name: str, fresh: Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_worker, "MAX_HELD", 6)
    logger = Logger(drafter_engine(name, FAMILY))
    worker, scheduler = logger.engine.worker, logger.engine.scheduler
    first, other = _prompts(2, 20, 0)
    worker.planner = Idle(worker.num_drafts, costs=None)
    scheduler.submit(Submit("a", list(first), PARAMS))
    for _ in range(9):
        scheduler.step()
    worker.planner = Planner(worker.num_drafts, costs=None)
    scheduler.submit(Submit("b", list(other), PARAMS))
    while scheduler.has_work:
        scheduler.step()
    scheduler.check_idle()
    assert not any(tokens[: len(first)] == first for tokens in logger.drafts)
    _check(logger, fresh, at_least=1)
