"""Returned logprobs against a teacher-forced pass of transformers, drafted or not."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from harness import (
    DETAILED,
    FAMILIES,
    VOCAB_SIZE,
    Engine,
    Job,
    Result,
    engine_config,
    make_engine,
    make_prompts,
    plain,
)
from oracle import erring, numbered, oracle_engine
from reference import logits_of
from torch import Tensor

from truespec.config import Algorithm
from truespec.core import TokenRecord
from truespec.params import LogprobParams, SamplingParams

PROMPTS = make_prompts(4, seed=21)
MODES = LogprobParams(top_k=5, token_ids=(7, 0), modes=("raw", "temperature"), details=True)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 5e-4}


def teacher_forced(family: str, job: Job, result: Result, dtype: torch.dtype) -> Tensor:
    """[num output tokens, V] logits that predict each output token."""
    text = [*job.prompt_ids, *result.token_ids]
    return logits_of(family, text, dtype)[len(job.prompt_ids) - 1 : -1]


def expect_logprobs(record: TokenRecord, mode: int, row: Tensor, atol: float) -> None:
    """A record's chosen, best and asked logprobs against log-softmax values [V]."""
    found = record.modes[mode]
    assert found.logprob == pytest.approx(row[record.token_id].item(), abs=atol)
    best = row.topk(5)
    assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=atol)
    if (-best.values.diff()).min() > 2 * atol:
        assert found.top_ids == best.indices.tolist()
    assert found.asked == pytest.approx(row[[7, 0]].tolist(), abs=atol)


def engines(family: str, jobs: list[Job]) -> list[Engine]:
    return [
        make_engine(family, engine_config()),
        make_engine(family, engine_config("NGRAM")),
        oracle_engine(family, jobs, erring(0.3, 8), num_drafts=4),
        oracle_engine(family, jobs, erring(0.2, 9), num_drafts=6, width=2),
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_logprobs_equal_a_teacher_forced_pass(
    family: str, temperature: float, dtype: torch.dtype
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=12, logprobs=MODES, top_p=0.95)
    jobs = numbered([Job(prompt, params) for prompt in PROMPTS])
    atol = TOLERANCE[dtype]
    for engine in engines(family, jobs):
        for job, result in zip(jobs, engine.run(jobs), strict=True):
            logits = teacher_forced(family, job, result, dtype)
            raw, scaled = logits.log_softmax(-1), (logits / (temperature or 1.0)).log_softmax(-1)
            for place, record in enumerate(result.records):
                expect_logprobs(record, 0, raw[place], atol)
                expect_logprobs(record, 1, scaled[place], atol)
                row = raw[place]
                entropy = -(row.exp() * row).sum().item()
                assert record.entropy == pytest.approx(entropy, abs=10 * atol)
                higher = int((row > row[record.token_id] + 2 * atol).sum())
                assert higher + 1 <= record.rank <= int((row >= row[record.token_id]).sum()) + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 16])
def test_there_are_as_many_logprobs_as_tokens(max_tokens: int) -> None:
    """B05: the first token comes from the prompt's last row, and counts like every other."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=MODES)
    (job,) = numbered([Job(PROMPTS[0][:5], params)])
    for engine in engines("llama", [job]):
        (result,) = engine.run([job])
        assert len(result.records) == max_tokens
        assert all(len(record.modes) == 2 for record in result.records)
        row = logits_of("llama", list(job.prompt_ids))[-1].log_softmax(-1)
        assert result.records[0].modes[0].logprob == pytest.approx(row.max().item(), abs=1e-4)


def test_requests_of_one_batch_get_their_own_widths() -> None:
    """B31: nothing, the chosen token only, several, asked ids only, in one batch with drafts."""
    wishes = [
        None,
        LogprobParams(),
        LogprobParams(top_k=5, modes=("processed", "raw")),
        LogprobParams(top_k=2, start=0, prompt_top_k=3),
        LogprobParams(token_ids=(3, 3, 40)),
        DETAILED,
    ]
    jobs = numbered(
        [
            Job(PROMPTS[i % 4], SamplingParams(max_tokens=14, logprobs=wish, top_k=4))
            for i, wish in enumerate(wishes)
        ]
    )
    for engine in engines("qwen3", jobs):
        for job, result, wish in zip(jobs, engine.run(jobs), wishes, strict=True):
            alone = plain("qwen3", job.prompt_ids, job.params)
            assert result.facts == alone.facts
            assert result.prompt_records == alone.prompt_records
            for record in result.records:
                assert len(record.modes) == (len(wish.modes) if wish else 0)
                for mode, found in zip(wish.modes if wish else (), record.modes, strict=True):
                    # Four tokens are left after top-k: no list of the processed mode is longer.
                    top_k = min(wish.top_k, 4) if mode == "processed" else wish.top_k
                    assert len(found.top_ids) == len(found.top_logprobs) == top_k
                    assert len(found.asked) == len(wish.token_ids)


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("start", [-1, 0, 4, 9, 10])
def test_prompt_logprobs_do_not_depend_on_chunks_or_prefix_hits(chunk: int, start: int) -> None:
    """B34: a prompt of 40 tokens (two full pages) and one of 10, each sent twice."""
    wish = LogprobParams(top_k=1, start=start, prompt_top_k=2, token_ids=(5,))
    params = SamplingParams(max_tokens=3, temperature=0.0, seed=1, logprobs=wish)
    engine = make_engine("llama", engine_config(chunk=chunk))
    for prompt in (PROMPTS[0][:10], (PROMPTS[0] * 4)[:40]):
        job = Job(prompt, params)
        first, second = engine.run([job])[0], engine.run([job])[0]
        assert first.prompt_records == second.prompt_records
        assert first.facts == second.facts
        expect_prompt_entries(first, prompt, start)
        if len(prompt) == 40:
            # The row before the first entry has to be computed again.
            wanted = 32 if start < 0 else max(0, start - 1) // 16 * 16
            assert second.num_cached_tokens == wanted


def expect_prompt_entries(result: Result, prompt: tuple[int, ...], start: int) -> None:
    entries = result.prompt_records
    assert [entry.token_id for entry in entries] == list(prompt[start:] if start >= 0 else ())
    logprobs = logits_of("llama", list(prompt)).log_softmax(-1)
    for position, entry in enumerate(entries, start):
        (mode,) = entry.modes
        if position == 0:
            assert mode.logprob is None
            assert mode.top_ids == []
            continue
        row = logprobs[position - 1]
        assert mode.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert mode.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert mode.asked == pytest.approx([row[5].item()], abs=1e-4)


def test_scoring_a_prompt_emits_nothing() -> None:
    wish = LogprobParams(start=0, prompt_top_k=1)
    score = SamplingParams(max_tokens=0, seed=1, logprobs=wish)
    both = replace(score, max_tokens=4)
    for algorithm in ("NONE", "NGRAM"):
        engine = make_engine("llama", engine_config(algorithm, chunk=5))  # type: ignore[arg-type]
        results = engine.run([Job(PROMPTS[i % 2], p) for i, p in enumerate((score, both) * 2)])
        for index, result in enumerate(results):
            prompt = PROMPTS[index % 2]
            assert [entry.token_id for entry in result.prompt_records] == list(prompt)
            if index % 2 == 0:
                assert result.records == []
                assert result.finish == ("length", None, "")
        assert results[0].prompt_records == results[2].prompt_records


@pytest.mark.parametrize("wants", [(False, True, False), (True, True, False), (True, True, True)])
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_prompt_entries_belong_to_their_own_request(
    algorithm: Algorithm, wants: tuple[bool, ...]
) -> None:
    """B04: prompts of 3, 2 and 4 tokens share a step, the first is then aborted or not."""
    wish = LogprobParams(start=0, prompt_top_k=1)
    for abort_after in (None, 1):
        jobs = [
            Job(
                PROMPTS[i][:length],
                SamplingParams(max_tokens=9, seed=i, logprobs=wish if wants[i] else None),
                abort_after=abort_after if i == 0 else None,
            )
            for i, length in enumerate((3, 2, 4))
        ]
        results = make_engine("llama", engine_config(algorithm)).run(jobs)
        for job, result, wanted in zip(jobs, results, wants, strict=True):
            if wanted:
                expect_own_prompt(result, job)
            else:
                assert result.prompt_records == []


def expect_own_prompt(result: Result, job: Job) -> None:
    assert [entry.token_id for entry in result.prompt_records] == list(job.prompt_ids)
    logprobs = logits_of("llama", list(job.prompt_ids)).log_softmax(-1)
    for position, entry in enumerate(result.prompt_records[1:], 1):
        wanted = logprobs[position - 1, entry.token_id].item()
        assert entry.modes[0].logprob == pytest.approx(wanted, abs=1e-4)


def test_a_greedy_token_has_its_real_logprob() -> None:
    """B06, B18: neither 0.0 nor a certain token by convention."""
    params = SamplingParams(
        temperature=0.0, max_tokens=10, seed=1, ignore_eos=True, logprobs=DETAILED
    )
    (result,) = make_engine("llama", engine_config("NGRAM")).run([Job(PROMPTS[2], params)])
    for record in result.records:
        for mode in record.modes:
            assert mode.logprob is not None
            assert -log(VOCAB_SIZE) <= mode.logprob < -1e-3
