"""A row that is not a number, a row left empty, a lost step: only their own requests end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    Engine,
    Job,
    Result,
    engine_config,
    expect_plain,
    kernels,
    make_prompts,
    plain,
)
from oracle import OracleWorker, Rule, oracle_engine, perfect

from tiny import tiny_model
from truespec.batch import Batch, StepOutput
from truespec.config import EngineConfig
from truespec.core import Finish
from truespec.message import Output, Submit
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model
from truespec.params import LogprobParams, SamplingParams
from truespec.speculative.base import WorkerPlan
from truespec.speculative.plain_worker import PlainWorker
from truespec.speculative.registry import build_from_plan

FAMILY = "llama"
PROMPTS = make_prompts(6, seed=31)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, seed=0, ignore_eos=True)
PLAIN = {i: plain(FAMILY, PROMPTS[i], replace(PARAMS, seed=i)) for i in range(6)}


def first_new(token_ids: Sequence[int], prompt: Sequence[int]) -> int:
    """A place in an output, not the first, whose token came neither before nor in the prompt."""
    places = range(2, len(token_ids) - 2)
    return next(i for i in places if token_ids[i] not in [*prompt, *token_ids[:i]])


VICTIM = 0
PLACE = first_new(PLAIN[VICTIM].token_ids, PROMPTS[VICTIM])
POISON = PLAIN[VICTIM].token_ids[PLACE]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """The target, except that whoever reads the token `POISON` computes NaN from there on."""
    model = tiny_model(
        FAMILY,
        seed=len(FAMILY),
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    path: Path = tmp_path_factory.mktemp("poisoned")
    model.save_pretrained(path)
    return load_model(path, kernels())


def poisoned_engine(
    model: CausalLM, rule: Rule, num_drafts: int, width: int = 1, config: EngineConfig | None = None
) -> Engine:
    known = {(PROMPTS[i], i): PLAIN[i].token_ids for i in PLAIN}
    plan = WorkerPlan(
        make=lambda parts, plan: OracleWorker(parts, plan, known, rule, width),
        num_drafts=num_drafts,
        num_draft_slots=num_drafts,
    )
    worker, resolved = build_from_plan(config or engine_config(), model, plan)
    return Engine(worker, resolved)


def healthy() -> list[Job]:
    """Requests that never meet the poison."""
    return [
        Job(PROMPTS[i], replace(PARAMS, seed=i))
        for i in range(1, 6)
        if POISON not in [*PROMPTS[i], *PLAIN[i].token_ids]
    ]


def expect_not_a_number(result: Result) -> None:
    assert result.finish is not None
    assert result.finish.kind == "error"
    assert "not a number" in result.finish.message


@pytest.mark.parametrize(
    ("num_drafts", "width"), [(0, 1), (1, 1), (3, 1), (5, 1), (9, 1), (6, 2), (8, 4)]
)
def test_a_nan_row_fails_its_request_after_the_tokens_before_it(
    poisoned: CausalLM, num_drafts: int, width: int
) -> None:
    assert len(healthy()) >= 2
    jobs = [Job(PROMPTS[VICTIM], replace(PARAMS, seed=VICTIM)), *healthy()]
    engine = poisoned_engine(poisoned, perfect, num_drafts, width)
    results = engine.run(jobs)
    expect_not_a_number(results[0])
    assert results[0].token_ids == PLAIN[VICTIM].token_ids[: PLACE + 1]
    expect_plain(FAMILY, jobs[1:], results[1:])


def test_a_nan_row_off_the_emitted_path_fails_nobody(poisoned: CausalLM) -> None:
    def poison_later(right: Sequence[int], place: int) -> list[int]:
        return [*right[:1], *[POISON] * (len(right) - 1)]

    jobs = healthy()
    results = poisoned_engine(poisoned, poison_later, 4).run(jobs)
    expect_plain(FAMILY, jobs, results)
    assert any(r.num_drafts == 4 for result in results for r in result.records)


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_a_prompt_that_is_not_a_number_never_enters_the_prefix_cache(
    poisoned: CausalLM, place: int, chunk: int, max_tokens: int
) -> None:
    prompt = [token_id for token_id in PROMPTS[1] * 3 if token_id != POISON][:40]
    prompt[place] = POISON
    wish = LogprobParams(start=0) if max_tokens == 0 else None
    params = replace(PARAMS, max_tokens=max_tokens, logprobs=wish)
    worker, resolved = build_from_plan(
        engine_config(chunk=chunk), poisoned, WorkerPlan(make=PlainWorker)
    )
    engine = Engine(worker, resolved)
    (result,) = engine.run([Job(tuple(prompt), params)])
    expect_not_a_number(result)
    assert result.records == []
    # Pages of chunks before the poison may stay; none that holds it may.
    assert engine.worker.cache.prefix.num_pages <= place // 16
    # It is found in the chunk that computes it: an abort meanwhile would keep the pages.
    assert engine.worker.runner.counts.num_rows <= max(chunk, place // chunk * chunk + chunk)


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_pages_that_held_nan_serve_others_as_new(poisoned: CausalLM, num_drafts: int) -> None:
    engine = poisoned_engine(poisoned, perfect, num_drafts, config=engine_config(pool=128))
    victim = Job(PROMPTS[VICTIM], replace(PARAMS, seed=VICTIM))
    for _ in range(3):
        jobs = [victim, *healthy()[:2]]
        results = engine.run(jobs)
        expect_not_a_number(results[0])
        expect_plain(FAMILY, jobs[1:], results[1:])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": (5,), "bad_words_ids": ((5,),)}, "allowed_token_ids and bad_words"),
        (
            {"allowed_token_ids": (9,), "stop_token_ids": (9,), "min_tokens": 3},
            "allowed_token_ids and min_tokens",
        ),
        (
            {"allowed_token_ids": (9, 7), "bad_words_ids": ((9, 9), (9, 7), (7, 9), (7, 7))},
            "allowed_token_ids and bad_words",
        ),
    ],
)
def test_a_row_left_empty_fails_its_request_by_name(fields: dict[str, object], names: str) -> None:
    params = replace(PARAMS, logit_bias=(), **fields)  # type: ignore[arg-type]
    good = Job(PROMPTS[1], replace(PARAMS, seed=1))
    engine = oracle_engine(FAMILY, [good], perfect, num_drafts=2)
    engine.worker._continuations[PROMPTS[0], 0] = [5, 9, 7, 5, 9] * 4  # type: ignore[attr-defined]
    results = engine.run([Job(PROMPTS[0], params), good])
    assert results[0].finish == Finish(
        "error", message=f"no token may be chosen: {names} forbid every one"
    )
    # In the third case one token is possible before nothing is.
    assert len(results[0].records) == (1 if len(fields["allowed_token_ids"]) == 2 else 0)  # type: ignore[arg-type]
    expect_plain(FAMILY, [good], results[1:])


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [Job(PROMPTS[i], replace(PARAMS, seed=i)) for i in range(3)]
    engine = oracle_engine(FAMILY, jobs, perfect, num_drafts=3)
    step, calls = engine.worker.step, []

    def failing(batch: Batch) -> StepOutput:
        calls.append(len(batch.chunks))
        if len(calls) == 3:
            raise RuntimeError("lost")
        return step(batch)

    monkeypatch.setattr(engine.worker, "step", failing)
    for result in engine.run(jobs):
        assert result.finish is not None
        assert result.finish.kind == "error"
        assert result.finish.message.startswith("internal error")
        assert result.records
    assert calls[-1] == 3
    expect_plain(FAMILY, jobs, engine.run(jobs))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [([], 3, "the prompt is empty"), ([5] * 100, 29, "at most 128 fit")],
)
def test_what_cannot_run_is_answered_once_while_others_run(
    prompt: list[int], max_tokens: int, reason: str
) -> None:
    """X01: a refused request is one message, and twenty others finish."""
    jobs = [Job(PROMPTS[i % 6], replace(PARAMS, seed=i % 6, max_tokens=6)) for i in range(20)]
    known = [Job(PROMPTS[i], replace(PARAMS, seed=i)) for i in range(6)]
    engine = oracle_engine(FAMILY, known, perfect, num_drafts=0, config=engine_config(pool=128))
    engine.scheduler.submit(Submit("bad", prompt, replace(PARAMS, max_tokens=max_tokens)))
    outputs: list[Output] = engine.scheduler.step()
    assert len(outputs) == 1
    assert outputs[0].finish is not None
    assert outputs[0].finish.kind == "error"
    assert reason in outputs[0].finish.message
    expect_plain(FAMILY, jobs, engine.run(jobs))
