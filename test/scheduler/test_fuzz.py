"""Random traffic in a tiny pool: every request ends once, as plain decoding says; nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from harness import (
    FAMILIES,
    PLENTY,
    Engine,
    Job,
    Result,
    engine_config,
    make_engine,
    make_params,
    make_prompts,
    plain,
)
from oracle import Rule, erring, guessing, numbered, oracle_engine

from truespec.message import Abort, Submit
from truespec.params import Grammar

POOL = 128  # tokens; the longest request nearly fills it
PROMPTS = make_prompts(9, seed=51)
GRAMMARS = (None, None, Grammar("json_object"), Grammar("regex", "[ab]{2,9}"))
JOBS = numbered(
    [
        Job(
            PROMPTS[index % len(PROMPTS)],
            replace(
                params,
                max_tokens=index * 5 % 37,
                min_tokens=min(params.min_tokens, index * 5 % 37),
                grammar=GRAMMARS[index % 4] if params.allowed_token_ids is None else None,
            ),
        )
        for index, params in enumerate(make_params(0) * 2)
    ]
)
DRAFTERS: dict[str, tuple[Rule, int, int] | None] = {
    "plain": None,
    "ngram": None,
    "chain": (erring(0.3, 4), 4, 1),
    "tree": (erring(0.2, 5), 8, 2),
    "guess": (guessing, 3, 1),
}


def fuzzed(drafter: str, family: str, rng: random.Random) -> Engine:
    config = engine_config(
        "NGRAM" if drafter == "ngram" else "NONE",
        pool=rng.choice((POOL, POOL + 32, PLENTY)),
        chunk=rng.choice((3, 8, 17, 256)),
        prefix=rng.random() < 0.7,
    )
    shape = DRAFTERS[drafter]
    if shape is None:
        return make_engine(family, config)
    rule, num_drafts, width = shape
    return oracle_engine(family, JOBS, rule, num_drafts=num_drafts, width=width, config=config)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_leaves_nothing_behind(drafter: str, seed: int) -> None:
    rng = random.Random(seed * 101 + len(drafter))
    family = FAMILIES[seed % len(FAMILIES)]
    engine = fuzzed(drafter, family, rng)
    jobs = {f"{i}": job for i, job in enumerate(rng.sample(JOBS, 14))}
    waiting, results = list(jobs), {rid: Result() for rid in jobs}
    aborted: set[str] = set()
    for _ in range(2000):
        if waiting and rng.random() < 0.4:
            rid = waiting.pop()
            job = jobs[rid]
            message = Submit(rid, list(job.prompt_ids), job.params, rng.choice((0, 0, 0, 1, 5)))
            engine.scheduler.submit(message)
        if rng.random() < 0.04:
            abort(engine, rng.choice(list(jobs)), results, aborted)
        if rng.random() < 0.03:
            engine.scheduler.flush_cache()
        for output in engine.scheduler.step():
            result = results[output.rid]
            assert result.finish is None, "a second last message"
            result.records += output.records
            result.prompt_records += output.prompt_records
            result.finish = output.finish
        if not waiting and not engine.scheduler.has_work:
            break
    engine.scheduler.check_idle()
    for rid, result in results.items():
        expect_as_plain(family, jobs[rid], result, is_aborted=rid in aborted)


def abort(engine: Engine, rid: str, results: dict[str, Result], aborted: set[str]) -> None:
    output = engine.scheduler.abort(Abort(rid, "fuzz"))
    if output is not None:
        assert results[rid].finish is None
        results[rid].finish = output.finish
        aborted.add(rid)


def expect_as_plain(family: str, job: Job, result: Result, *, is_aborted: bool) -> None:
    assert result.finish is not None
    wanted = plain(family, job.prompt_ids, job.params)
    assert wanted.finish is not None
    assert wanted.finish.kind in ("stop", "length"), wanted.finish
    if is_aborted:
        assert result.facts == wanted.facts[: len(result.facts)]
        return
    assert result.facts == wanted.facts
    assert result.prompt_records == wanted.prompt_records
    assert result.finish == wanted.finish


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(3, 60))
def test_more_random_traffic_leaves_nothing_behind(drafter: str, seed: int) -> None:
    test_random_traffic_leaves_nothing_behind(drafter, seed)
