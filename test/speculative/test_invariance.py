"""Law 1: what a request returns does not depend on how its tokens were drafted.

Tokens, logprobs in every mode, alternatives, asked ids, rank and entropy are compared to the bit
with plain decoding, alone, without any cache. Every test asserts that its drafts were accepted or
refused as intended, since otherwise the comparison would prove nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
from drafters import DRAFTERS, drafter_engine
from harness import (
    FAMILIES,
    PLENTY,
    Engine,
    Job,
    Result,
    expect_plain,
    kernels,
    make_params,
    make_prompts,
    pairwise_rows,
    total,
)
from oracle import erring, guessing, numbered, oracle_engine, perfect, wrong
from self_drafter import self_drafting_engine

from truespec.speculative.costs import CostTable, DraftCosts, StepCosts

MAX_TOKENS = 24
PROMPTS = make_prompts(12)
JOBS = numbered(
    [
        Job(PROMPTS[index % len(PROMPTS)], params, arrival=index * 2 % 7)
        for index, params in enumerate(make_params(MAX_TOKENS))
    ]
)


def test_the_jobs_pair_every_two_parameter_settings() -> None:
    rows = pairwise_rows([range(3), range(4), range(2)])
    for left, right in ((0, 1), (0, 2), (1, 2)):
        sizes = (3, 4, 2)
        assert len({(row[left], row[right]) for row in rows}) == sizes[left] * sizes[right]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_perfect_drafter_is_accepted_always_and_changes_nothing(family: str) -> None:
    engine = oracle_engine(family, JOBS, perfect, num_drafts=4)
    results = engine.run(JOBS)
    expect_plain(family, JOBS, results)
    counts = total(results)
    assert counts.num_accepted > 100
    for job, result in zip(JOBS, results, strict=True):
        if not job.params.stop_token_ids and job.params.ignore_eos:  # no step was cut
            assert result.acceptance.num_accepted == result.acceptance.num_drafts


def test_the_target_as_its_own_drafter_is_accepted_always_at_every_temperature() -> None:
    """Filters, penalties, bias and all: the noise of drafts is that of verification."""
    results = self_drafting_engine("llama").run(JOBS)
    expect_plain("llama", JOBS, results)
    for job, result in zip(JOBS, results, strict=True):
        if not job.params.stop_token_ids and job.params.ignore_eos:
            assert result.acceptance.num_drafts > 0
            assert result.acceptance.num_accepted == result.acceptance.num_drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_is_always_wrong_is_never_accepted_and_changes_nothing(family: str) -> None:
    engine = oracle_engine(family, JOBS, wrong, num_drafts=3)
    results = engine.run(JOBS)
    expect_plain(family, JOBS, results)
    assert total(results).num_drafts > 300
    assert total(results).num_accepted == 0


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 8])
def test_a_drafter_that_errs_now_and_then_changes_nothing(num_drafts: int) -> None:
    family = FAMILIES[num_drafts % 3]
    results = oracle_engine(family, JOBS, erring(0.2, num_drafts), num_drafts=num_drafts).run(JOBS)
    expect_plain(family, JOBS, results)
    counts = total(results)
    assert 0.3 * counts.num_drafts < counts.num_accepted < 0.9 * counts.num_drafts
    assert all(counts.per_position), "some place of the draft was never accepted"


def test_a_drafter_that_guesses_changes_nothing() -> None:
    results = oracle_engine("qwen3", JOBS, guessing, num_drafts=4).run(JOBS)
    expect_plain("qwen3", JOBS, results)
    assert 0 < total(results).num_accepted < 0.2 * total(results).num_drafts


@pytest.mark.parametrize(("num_drafts", "width"), [(4, 2), (12, 4), (8, 2), (21, 7)])
def test_trees_of_drafts_change_nothing(num_drafts: int, width: int) -> None:
    family = FAMILIES[width % 3]
    engine = oracle_engine(family, JOBS, erring(0.2, 3), num_drafts=num_drafts, width=width)
    results = engine.run(JOBS)
    expect_plain(family, JOBS, results)
    assert total(results).num_accepted > 100
    assert max(result.acceptance.num_drafts for result in results) > 0
    deepest = len([n for n in total(results).histogram[1:] if n])
    assert deepest == num_drafts // width, "the tree was never walked to its end"


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is driven."""

    family: str
    pool: int
    chunk: int
    prefix: bool
    num_requests: int


SETTINGS = [
    Setting(*row)
    for row in pairwise_rows([FAMILIES, (PLENTY, 128), (256, 11, 32), (True, False), (1, 3, 8)])
]


def _driven(setting: Setting, engine: Engine, seed: int) -> list[Result]:
    """Run a choice of jobs, twice where prefixes are kept, with one abort; check all results."""
    rng = random.Random(seed)
    jobs = rng.sample(JOBS, setting.num_requests)
    if len(jobs) > 2:
        jobs[1] = replace(jobs[1], abort_after=rng.randint(1, 6))
    results = engine.run(jobs)
    expect_plain(setting.family, jobs, results)
    again = engine.run(jobs)
    expect_plain(setting.family, jobs, again)
    assert any(r.num_cached_tokens for r in again) == setting.prefix or len(jobs) == 1
    return results + again


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_setting_of_the_engine_shows_in_what_a_drafter_returns(name: str) -> None:
    counts, retractions = [], 0
    for index, setting in enumerate(SETTINGS):
        engine = drafter_engine(
            name, setting.family, pool=setting.pool, chunk=setting.chunk, prefix=setting.prefix
        )
        counts += [result.acceptance for result in _driven(setting, engine, index)]
        retractions += engine.num_retractions
    assert retractions > 3, "the small pool was never too small"
    accepted = sum(count.num_accepted for count in counts)
    assert 0 < accepted < sum(count.num_drafts for count in counts)


@pytest.mark.parametrize("quantization", ["none", "q8_0", "q4_1"])
@pytest.mark.parametrize("name", ["dspark", "dflash", "eagle3 tree 4x4", "eagle chain", "nextn"])
def test_fewer_bits_in_a_drafter_change_nothing(name: str, quantization: str) -> None:
    engine = drafter_engine(name, "qwen2", draft_model_quantization=quantization)
    results = engine.run(JOBS[:12])
    expect_plain("qwen2", JOBS[:12], results)
    assert 0 < total(results).num_accepted < total(results).num_drafts


def test_a_drafter_has_four_bits_where_kernels_compute_on_them() -> None:
    chosen = drafter_engine("dspark", "llama").worker.config.speculative_draft_model_quantization
    assert chosen == ("q4_1" if kernels().name == "numba" else "none")
    engine = drafter_engine("dspark", "llama", draft_model_quantization="q8_0")
    assert engine.worker.config.speculative_draft_model_quantization == "q8_0"


@pytest.mark.parametrize("name", ["ngram", "dspark", "eagle3 tree 4x4", "multi-layer chained"])
def test_draft_lengths_that_follow_costs_change_nothing(name: str) -> None:
    """Rows above four cost so much that most drafts are left out; drafting itself is free."""
    engine = drafter_engine(name, "llama")
    rows = CostTable([1, 4, 8, 32], [1.0, 1.1, 2.5, 9.0])
    costs = StepCosts(rows, DraftCosts([1], [CostTable([], [])]))
    free = total(engine.run(JOBS[:12]))
    engine.worker.planner = replace(engine.worker.planner, costs=costs)  # knows nothing yet
    results = engine.run(JOBS[:12])
    expect_plain("llama", JOBS[:12], results)
    assert 0 < total(results).num_drafts < free.num_drafts


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_setting_shows_in_the_full_product(family: str, name: str) -> None:
    for pool, chunk, prefix in product((PLENTY, 128), (256, 11, 32, 1), (True, False)):
        engine = drafter_engine(name, family, pool=pool, chunk=chunk, prefix=prefix)
        for start in range(0, len(JOBS), 8):
            expect_plain(family, JOBS[start : start + 8], engine.run(JOBS[start : start + 8]))
