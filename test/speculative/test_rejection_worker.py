"""Rejection mode through the engine: the target's law, repeatable, refused where not built."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from drafters import drafter_engine
from harness import (
    Job,
    engine_config,
    expect_plain,
    make_engine,
    make_prompts,
    plain,
    total,
)

from truespec.params import LogprobParams, SamplingParams
from truespec.speculative.registry import worker_class

CHAINS = ["dspark", "dspark threshold", "dflash", "eagle3 chain", "multi-layer chained"]
FAMILY = "llama"
PROMPTS = make_prompts(9, seed=4)
TOP_K, LENGTH, DRAWS = 2, 3, 500
PARAMS = SamplingParams(temperature=2.0, top_k=TOP_K, max_tokens=LENGTH, ignore_eos=True, seed=0)


def _law(prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """Exact probability of every output, from the plain engine's processed logprobs."""
    if length == 0:
        return {(): 1.0}
    wish = LogprobParams(top_k=TOP_K, modes=("processed",))
    record = plain(FAMILY, prompt, replace(PARAMS, max_tokens=1, logprobs=wish)).records[0]
    law = {}
    for token_id, logprob in zip(
        record.modes[0].top_ids, record.modes[0].top_logprobs, strict=True
    ):
        for rest, p in _law((*prompt, token_id), length - 1).items():
            law[token_id, *rest] = math.exp(logprob) * p
    return law


def test_outputs_follow_the_targets_law_to_chi_square() -> None:
    prompt = PROMPTS[1]
    engine = drafter_engine("dspark threshold", FAMILY, accept="rejection")
    # Longer outputs than are counted, so that drafts are made for every counted token.
    jobs = [Job(prompt, replace(PARAMS, seed=7 + i, max_tokens=LENGTH + 2)) for i in range(DRAWS)]
    results = engine.run(jobs)
    counts = total(results)
    assert counts.num_accepted > 60
    assert counts.num_drafts - counts.num_accepted > 60
    law = _law(prompt, LENGTH)
    assert abs(sum(law.values()) - 1) < 1e-5
    seen = Counter(tuple(result.token_ids[:LENGTH]) for result in results)
    assert set(seen) <= set(law)
    statistic = sum((seen[o] - DRAWS * p) ** 2 / (DRAWS * p) for o, p in law.items())
    # 99.9 % point of chi-square with TOP_K ** LENGTH - 1 = 7 degrees of freedom.
    assert statistic < 24.3


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_requests_and_those_without_drafts_equal_plain_decoding(name: str) -> None:
    engine = drafter_engine(name, FAMILY, accept="rejection")
    jobs = [Job(ids, SamplingParams(temperature=0.0, seed=1, max_tokens=16)) for ids in PROMPTS[:4]]
    sampled = SamplingParams(temperature=1.0, seed=2, max_tokens=16, speculative=False)
    jobs += [Job(ids, sampled) for ids in PROMPTS[4:7]]
    results = engine.run(jobs)
    expect_plain(FAMILY, jobs, results)
    assert total(results[:4]).num_drafts > 20
    assert total(results[4:]).num_drafts == 0


@pytest.mark.parametrize("name", CHAINS)
def test_x05_a_seed_repeats_its_output_alone_and_in_a_batch(name: str) -> None:
    def engine_run(jobs: list[Job]) -> list[list[int]]:
        engine = drafter_engine(name, FAMILY, accept="rejection")
        return [result.token_ids for result in engine.run(jobs)]

    params = SamplingParams(temperature=1.2, seed=5, max_tokens=20, ignore_eos=True)
    jobs = [Job(ids, params, arrival=i) for i, ids in enumerate(PROMPTS[:5])]
    together = engine_run(jobs)
    assert together == [engine_run([replace(job, arrival=0)])[0] for job in jobs]
    other = engine_run([replace(jobs[0], params=replace(params, seed=6))])[0]
    assert other != together[0]


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("NGRAM", {"accept": "rejection"}, "--speculative-accept has no effect with NGRAM"),
        ("NONE", {"accept": "rejection"}, "--speculative-accept has no effect with NONE"),
        ("DSPARK", {"eagle_topk": 4}, "--speculative-eagle-topk has no effect with DSPARK"),
        ("EAGLE3", {"dspark_block_size": 4}, "--speculative-dspark-block-size has no effect"),
        ("DFLASH", {"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle has no effect"),
        ("NONE", {"num_draft_tokens": 4}, "--speculative-num-draft-tokens has no effect"),
    ],
)
def test_an_option_that_an_algorithm_does_not_read_is_refused(
    algorithm: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        worker_class(engine_config(algorithm, **options))  # type: ignore[arg-type]


WRONG_SHAPES: dict[str, tuple[str, dict[str, object], str]] = {
    "rejection of trees": (
        "eagle3 tree 2x2",
        {"accept": "rejection"},
        "rejection is built for chains only",
    ),
    "a tree over heads": ("multi-layer chained", {"eagle_topk": 2}, "drafts chains only"),
    "more steps than heads": ("multi-layer chained", {"num_steps": 4}, "the drafter has 3 heads"),
    "chain of other rows": (
        "eagle3 chain",
        {"num_steps": 4, "num_draft_tokens": 4},
        "4 steps with 1 children per node need 5 to 5 rows",
    ),
    "a tree of too many rows": ("eagle3 tree 2x2", {"num_draft_tokens": 8}, "need 2 to 7 rows"),
    "no steps": ("eagle3 chain", {"num_steps": 0}, "at least 1 is needed"),
    "more children than ids": ("eagle3 tree 2x2", {"eagle_topk": 41}, "41 of 40 draft ids"),
    "more rows than a block": ("dspark", {"num_draft_tokens": 7}, "expected 2 to 6"),
    "a threshold of one": ("dspark", {"dspark_confidence_threshold": 1.0}, "expected 0 to below 1"),
    "a longer block": ("dspark", {"dspark_block_size": 9}, "trained for 5"),
}


@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_options_that_contradict_the_drafter_or_each_other_are_refused(case: str) -> None:
    name, options, message = WRONG_SHAPES[case]
    with pytest.raises(ValueError, match=message):
        drafter_engine(name, FAMILY, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "algorithm", "message"),
    [
        ("eagle3 chain", "EAGLE", "is to be run as EAGLE3, not as EAGLE"),
        ("eagle chain", "EAGLE3", "is to be run as EAGLE, not as EAGLE3"),
        ("nextn", "EAGLE3", "is to be run as NEXTN"),
        ("multi-layer chained", "NEXTN", "has 3 heads: --enable-multi-layer-eagle"),
        ("dspark", "EAGLE3", "holds neither an EAGLE head nor MTP heads"),
        ("dspark", "DFLASH", "has a Markov head: run it as DSPARK"),
        ("eagle3 chain", "DSPARK", "is no block drafter"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_name(
    name: str, algorithm: str, message: str
) -> None:
    from drafters import drafter_path

    config = engine_config(algorithm, drafter=drafter_path(name))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        make_engine(FAMILY, config)
