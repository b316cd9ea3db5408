"""The drafters in the package: they load for the packaged model, draft well, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from truespec import LLM, EngineConfig, SamplingParams
from truespec.bench.spec import configured
from truespec.speculative import registry

PROMPT = "Give me three tips for learning to cook."
PARAMS = SamplingParams(temperature=0.0, max_tokens=64)
MEGABYTES = 80


@pytest.fixture(scope="module")
def plain_ids() -> list[int]:
    return answer("NONE")[0]


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH", "EAGLE3", "MTP"])
def test_a_shipped_drafter_saves_steps_and_changes_no_token(
    algorithm: str, plain_ids: list[int]
) -> None:
    ids, mean_length = answer(algorithm)
    assert ids == plain_ids
    assert mean_length > 1.4


def test_the_shipped_drafters_are_small() -> None:
    sizes = [file.stat().st_size for file in Path(registry.ASSETS).rglob("*") if file.is_file()]
    assert sum(sizes) < MEGABYTES * 1e6


def answer(algorithm: str) -> tuple[list[int], float]:
    """Ids of a greedy answer, and tokens per step when every step drafts."""
    base = EngineConfig(max_total_tokens=1024, speculative_adaptive=False)
    llm = LLM(configured(base, algorithm))
    ids = llm.chat_ids([{"role": "user", "content": PROMPT}])
    done = llm.generate([ids], PARAMS)[0]
    return [record.token_id for record in done.records], done.acceptance.mean_length
