"""Law 1: what a request returns does not depend on how its tokens were drafted.

Tokens, logprobs in every mode, alternatives, asked ids, rank and entropy are compared to the bit
with plain decoding, alone, without any cache. Every test asserts that its drafts were accepted or
refused as intended, since otherwise the comparison would prove nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from harness import (
    FAMILIES,
    PLENTY,
    Engine,
    Job,
    Result,
    engine_config,
    expect_plain,
    make_engine,
    make_params,
    make_prompts,
    pairwise_rows,
    total,
)
from oracle import erring, guessing, numbered, oracle_engine, perfect, wrong

import tiny_drafters
from tiny import Option
from truespec.config import Algorithm

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
DRAFTERS: dict[str, tuple[Algorithm, Callable[[Path], Path] | None, dict[str, Option]]] = {
    "ngram": ("NGRAM", None, {"num_draft_tokens": 5}),
    "dspark": ("DSPARK", tiny_drafters.dspark, {}),
    "dspark threshold": ("DSPARK", tiny_drafters.dspark, {"dspark_confidence_threshold": 0.4}),
    "dspark short": ("DSPARK", tiny_drafters.dspark, {"dspark_block_size": 3}),
    "dflash": ("DFLASH", tiny_drafters.dflash, {}),
    "eagle3 chain": ("EAGLE3", tiny_drafters.eagle3, {"num_steps": 4}),
    "eagle3 tree 2x2": ("EAGLE3", tiny_drafters.eagle3, {"num_steps": 2, "eagle_topk": 2}),
    "eagle3 tree 4x4": (
        "EAGLE3",
        tiny_drafters.eagle3,
        {"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 17},
    ),
    "eagle3 tree 7x4 of 8": (
        "EAGLE3",
        tiny_drafters.eagle3,
        {"num_steps": 7, "eagle_topk": 4, "num_draft_tokens": 8},
    ),
    "eagle chain": ("EAGLE", tiny_drafters.eagle1, {"num_steps": 3}),
    "multi-layer chained": (
        "EAGLE",
        partial(tiny_drafters.mtp, family="step", num_heads=3),
        {"enable_multi_layer_eagle": True},
    ),
    "multi-layer not chained": (
        "NEXTN",
        partial(tiny_drafters.mtp, family="mimo_v2", num_heads=4),
        {"enable_multi_layer_eagle": True},
    ),
    "nextn": ("NEXTN", partial(tiny_drafters.mtp, family="mimo"), {"num_steps": 3}),
}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """The files of every drafter."""
    root = tmp_path_factory.mktemp("drafters")
    return {
        name: None if make is None else make(root / name) for name, (_, make, _) in DRAFTERS.items()
    }


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
def test_no_setting_of_the_engine_shows_in_what_a_drafter_returns(
    name: str, drafters: dict[str, Path | None]
) -> None:
    algorithm, _, options = DRAFTERS[name]
    counts, retractions = [], 0
    for index, setting in enumerate(SETTINGS):
        config = engine_config(
            algorithm,
            drafter=drafters[name],
            pool=setting.pool,
            chunk=setting.chunk,
            prefix=setting.prefix,
            **options,
        )
        engine = make_engine(setting.family, config)
        counts += [result.acceptance for result in _driven(setting, engine, index)]
        retractions += engine.num_retractions
    assert retractions > 3, "the small pool was never too small"
    accepted = sum(count.num_accepted for count in counts)
    assert 0 < accepted < sum(count.num_drafts for count in counts)
