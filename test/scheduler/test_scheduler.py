"""Admission, order, retraction, aborts and accounting, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness import (
    Engine,
    Job,
    engine_config,
    expect_plain,
    make_engine,
    make_prompts,
    plain,
)
from oracle import oracle_engine, perfect

from truespec.config import Algorithm
from truespec.message import Abort, Output, Submit
from truespec.params import LogprobParams, SamplingParams, choice_seed

FAMILY = "llama"
PROMPTS = make_prompts(9, seed=41)
LONG = (PROMPTS[0] * 5)[:48]
PARAMS = SamplingParams(temperature=0.8, max_tokens=10, seed=3, ignore_eos=True)
ALGORITHMS: list[Algorithm] = ["NONE", "NGRAM"]


def submit(
    engine: Engine, rid: str, prompt: tuple[int, ...], priority: int = 0, **fields: object
) -> None:
    params = replace(PARAMS, **fields)  # type: ignore[arg-type]
    engine.scheduler.submit(Submit(rid, list(prompt), params, priority))


def drain(engine: Engine) -> list[Output]:
    """All outputs until nothing is left; then every page must be accounted for."""
    outputs = []
    while engine.scheduler.has_work:
        outputs += engine.scheduler.step()
    engine.scheduler.check_idle()
    return outputs


def finished(outputs: list[Output]) -> list[str]:
    """Names in the order in which requests ended; each exactly once."""
    names = [output.rid for output in outputs if output.finish is not None]
    assert len(set(names)) == len(names)
    return names


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_request_ends_with_exactly_one_last_message(algorithm: Algorithm) -> None:
    engine = make_engine(FAMILY, engine_config(algorithm, pool=160))
    for index, prompt in enumerate(PROMPTS):
        submit(engine, f"{index}", prompt, max_tokens=index)
    outputs = drain(engine)
    assert sorted(finished(outputs)) == sorted(f"{i}" for i in range(9))
    for index in range(9):
        own = [output for output in outputs if output.rid == f"{index}"]
        assert sum(len(output.records) for output in own) == index
        assert own[-1].finish == ("length", None, "")


def test_a_name_in_use_is_refused_while_the_first_request_goes_on() -> None:
    engine = make_engine(FAMILY, engine_config())
    submit(engine, "same", PROMPTS[0])
    submit(engine, "same", PROMPTS[1])
    refused, *_ = engine.scheduler.step()
    assert refused.finish == ("error", None, "request id same is in use")
    assert finished(drain(engine)) == ["same"]


def test_a_name_can_be_used_again_once_its_request_is_over() -> None:
    engine = make_engine(FAMILY, engine_config("NGRAM"))
    for _ in range(2):
        submit(engine, "same", PROMPTS[0])
        outputs = drain(engine)
        records = [record for output in outputs for record in output.records]
        assert [r.token_id for r in records] == plain(FAMILY, PROMPTS[0], PARAMS).token_ids


def test_requests_are_admitted_by_priority_then_arrival() -> None:
    # One row at a time: a pool in which only one prompt of three pages fits.
    engine = make_engine(FAMILY, engine_config(pool=64, prefix=False))
    for rid, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 9), ("e", 5), ("f", -1)):
        submit(engine, rid, LONG[:40], priority)
    assert finished(drain(engine)) == ["d", "b", "e", "a", "c", "f"]


def test_a_waiting_request_of_high_priority_overtakes_but_does_not_stop_a_running_one() -> None:
    engine = make_engine(FAMILY, engine_config(pool=64, prefix=False))
    submit(engine, "first", LONG[:40])
    engine.scheduler.step()
    submit(engine, "second", LONG[:40])
    submit(engine, "urgent", LONG[:40], priority=1)
    outputs = engine.scheduler.step() + drain(engine)
    assert finished(outputs) == ["first", "urgent", "second"]
    assert engine.num_retractions == 0


def test_the_youngest_of_lowest_priority_is_retracted() -> None:
    engine = make_engine(FAMILY, engine_config(pool=96, prefix=False))
    for rid, priority in (("old", 0), ("young", 0), ("urgent", 3)):
        submit(engine, rid, PROMPTS[2][:10], priority, max_tokens=40)
        engine.scheduler.step()
    outputs = drain(engine)
    assert engine.num_retractions > 0
    assert finished(outputs)[-1] == "young"
    for rid in ("old", "young", "urgent"):
        records = [r for output in outputs for r in output.records if output.rid == rid]
        assert len(records) <= 40


@pytest.mark.parametrize("pool", [96, 112, 128])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_retracted_request_goes_on_without_a_gap_or_a_repeat(
    algorithm: Algorithm, pool: int
) -> None:
    """B15: what was returned before stays, what comes after is what plain decoding gives."""
    wish = LogprobParams(top_k=2, start=3, prompt_top_k=1)
    jobs = [
        Job(PROMPTS[i][:14], replace(PARAMS, seed=i, max_tokens=36, logprobs=wish), arrival=i % 3)
        for i in range(5)
    ]
    engine = make_engine(FAMILY, engine_config(algorithm, pool=pool, chunk=9))
    results = engine.run(jobs)
    assert engine.num_retractions > 0
    expect_plain(FAMILY, jobs, results)
    assert all(len(result.records) == 36 for result in results)


def test_a_retraction_before_the_first_token_scores_the_prompt_once() -> None:
    """B15: the victim is still being prefilled, with half of its prompt entries made."""
    wish = LogprobParams(start=0)
    engine = make_engine(FAMILY, engine_config(pool=80, chunk=8, prefix=False))
    # The old one fills its third page just while the young one is read.
    old = Job(PROMPTS[1][:15], replace(PARAMS, seed=1, max_tokens=40))
    young = Job(LONG[:46], replace(PARAMS, seed=2, logprobs=wish), arrival=14)
    results = engine.run([old, young])
    assert engine.num_retractions > 0
    expect_plain(FAMILY, [old, young], results)
    assert len(results[1].prompt_records) == 46
    # The old one reached its third page before the young one was read: both ran its first rows.
    assert engine.worker.runner.counts.num_rows > 15 + 39 + 46 + 9


def until_waiting(engine: Engine) -> None:
    submit(engine, "target", LONG, max_tokens=8)


def until_prefilling(engine: Engine) -> None:
    submit(engine, "target", LONG, max_tokens=8)
    engine.scheduler.step()


def until_decoding(engine: Engine) -> None:
    submit(engine, "target", PROMPTS[3][:20], max_tokens=30)
    while not any(output.records for output in engine.scheduler.step() if output.rid == "target"):
        pass


def until_retracted(engine: Engine) -> None:
    submit(engine, "target", PROMPTS[3][:20], max_tokens=30)
    submit(engine, "other", PROMPTS[4][:12], priority=1, max_tokens=40)
    while engine.num_retractions == 0:
        engine.scheduler.step()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "reach", [until_waiting, until_prefilling, until_decoding, until_retracted]
)
def test_an_abort_ends_a_request_in_every_state(
    reach: Callable[[Engine], None], algorithm: Algorithm
) -> None:
    engine = make_engine(FAMILY, engine_config(algorithm, pool=64, chunk=16, prefix=False))
    reach(engine)
    output = engine.scheduler.abort(Abort("target", "gone"))
    assert output is not None
    assert output.finish == ("abort", None, "gone")
    assert engine.scheduler.abort(Abort("target", "again")) is None
    assert "target" not in {output.rid for output in drain(engine)}


def test_an_abort_of_a_finished_or_unknown_request_says_nothing() -> None:
    engine = make_engine(FAMILY, engine_config())
    submit(engine, "done", PROMPTS[0], max_tokens=1)
    drain(engine)
    assert engine.scheduler.abort(Abort("done")) is None
    assert engine.scheduler.abort(Abort("never")) is None


def test_an_aborted_prefill_leaves_its_pages_to_the_next_one() -> None:
    engine = make_engine(FAMILY, engine_config(chunk=16))
    submit(engine, "target", LONG)
    engine.scheduler.step()
    engine.scheduler.step()
    engine.scheduler.abort(Abort("target"))
    job = Job(LONG, PARAMS)
    (result,) = engine.run([job])
    assert result.num_cached_tokens == 32
    expect_plain(FAMILY, [job], [result])


def test_choices_of_one_prompt_share_its_pages_and_differ() -> None:
    engine = make_engine(FAMILY, engine_config(chunk=16))
    jobs = [Job(LONG, replace(PARAMS, seed=choice_seed(7, choice))) for choice in range(4)]
    results = engine.run(jobs)
    expect_plain(FAMILY, jobs, results)
    assert [result.num_cached_tokens for result in results] == [0, 32, 32, 32]
    assert len({tuple(result.token_ids) for result in results}) == 4
    # 48 rows once, then 16 for each of the others, and a row per further token.
    assert engine.worker.runner.counts.num_rows == 48 + 3 * 16 + 4 * 9


def test_a_budget_cuts_an_accepted_draft_and_leaves_the_next_request_alone() -> None:
    """B07: two tokens left, four accepted."""
    whole = plain(FAMILY, PROMPTS[5], replace(PARAMS, max_tokens=12)).token_ids
    for max_tokens in range(1, 7):
        params = replace(PARAMS, max_tokens=max_tokens, logprobs=LogprobParams(top_k=1))
        job, other = Job(PROMPTS[5], params), Job(PROMPTS[6], PARAMS)
        engine = oracle_engine(FAMILY, [job, other], perfect, num_drafts=4)
        result, after = engine.run([job])[0], engine.run([other])[0]
        assert result.token_ids == whole[:max_tokens]
        assert all(len(record.modes) == 1 for record in result.records)
        assert result.finish == ("length", None, "")
        expect_plain(FAMILY, [other], [after])


def test_the_context_ends_a_request_like_its_own_limit() -> None:
    prompt = LONG[:20]
    engine = make_engine(FAMILY, engine_config(pool=64))
    most = engine.scheduler.max_request_tokens
    assert most == 64
    job = Job(prompt, replace(PARAMS, max_tokens=most - len(prompt)))
    expect_plain(FAMILY, [job], engine.run([job]))


def test_a_step_computes_no_more_prompt_rows_than_allowed() -> None:
    engine = make_engine(FAMILY, engine_config(chunk=10, prefix=False))
    for index in range(4):
        submit(engine, f"{index}", PROMPTS[index], max_tokens=3)
    counts = engine.worker.runner.counts
    while engine.scheduler.has_work:
        before = counts.num_rows
        engine.scheduler.step()
        assert counts.num_rows - before <= 10 + 4  # and a row per decoding request
    rows = sum(len(PROMPTS[index]) for index in range(4)) + 4 * 2
    assert counts.num_rows == rows


def test_totals_and_gauges_follow_the_requests() -> None:
    engine = make_engine(FAMILY, engine_config(chunk=64))
    submit(engine, "a", LONG)
    submit(engine, "b", LONG)
    engine.scheduler.step()
    stats = engine.scheduler.stats()
    # The second waits for the pages that the first is computing.
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_pages_used == 3
    drain(engine)
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
    assert stats.num_prompt_tokens == 96
    assert stats.num_cached_prompt_tokens == 32
    assert stats.num_forward_rows == 48 + 16 + 2 * 9
    assert stats.num_pages_cached == engine.scheduler.flush_cache()
    assert engine.scheduler.stats().num_pages_cached == 0
