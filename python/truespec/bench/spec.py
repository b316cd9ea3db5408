"""Compares drafters with plain decoding on one set of prompts, in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from truespec.bench.acceptance import AcceptedLengths, accepted_lengths
from truespec.config import Algorithm, EngineConfig
from truespec.llm import LLM, Generation
from truespec.params import SamplingParams

MTP = "MTP"  # several heads, one per draft: NEXTN with --enable-multi-layer-eagle
ALGORITHMS = (*get_args(Algorithm), MTP)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt and the category it is reported under."""

    category: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        max_tokens: output per prompt.
        temperatures: each prompt runs at each.
        batches: batch sizes whose speed is measured.
        speed_prompts: prompts per speed measurement (at least the largest batch).
        rounds: interleaved repetitions of the speed measurement.
    """

    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batches: tuple[int, ...] = (1, 4, 8)
    speed_prompts: int = 8
    rounds: int = 3


@dataclass(slots=True)
class Figures:
    """What was measured of one algorithm.

    Attributes:
        lengths: temperature -> category ("all" for everything) -> counts.
        tokens_per_second: batch size -> one value per round.
        shares: part of a step's time by its phase, at the first batch size.
    """

    lengths: dict[float, dict[str, AcceptedLengths]] = field(default_factory=dict)
    tokens_per_second: dict[int, list[float]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def speed(self, batch: int) -> float:
        """Median tokens per second."""
        return statistics.median(self.tokens_per_second[batch])


def read_prompts(path: Path, llm: LLM) -> list[BenchPrompt]:
    """JSON lines with `prompt` and optionally `category`, put into the model's chat template."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = llm.chat_ids([{"role": "user", "content": row["prompt"]}])
        prompts.append(BenchPrompt(row.get("category", "all"), ids))
    return prompts


def configured(base: EngineConfig, algorithm: str) -> EngineConfig:
    """`base` with one of ALGORITHMS."""
    if algorithm == MTP:
        return replace(base, speculative_algorithm="NEXTN", enable_multi_layer_eagle=True)
    return replace(base, speculative_algorithm=cast(Algorithm, algorithm))


def bench(
    base: EngineConfig, algorithms: Sequence[str], prompts_path: Path, plan: Plan
) -> dict[str, Figures]:
    """Figures per algorithm; "NONE" is plain decoding. Drafts are made whether they pay or not
    where lengths are measured, and as the planner says where speed is."""
    engines = {algorithm: LLM(configured(base, algorithm)) for algorithm in algorithms}
    prompts = read_prompts(prompts_path, next(iter(engines.values())))
    figures = {name: Figures() for name in engines}
    for name, llm in engines.items():
        costs, llm.worker.planner.costs = llm.worker.planner.costs, None
        for temperature in plan.temperatures:
            figures[name].lengths[temperature] = _lengths(llm, prompts, temperature, plan)
        llm.worker.planner.costs = costs
    for number in range(plan.rounds + 1):  # the first round warms up
        for batch in plan.batches:
            for name, llm in engines.items():
                value = _speed(llm, prompts[: plan.speed_prompts], batch, plan.max_tokens)
                if number:
                    figures[name].tokens_per_second.setdefault(batch, []).append(value)
    for name, llm in engines.items():
        figures[name].shares = _shares(llm, prompts[: plan.speed_prompts], plan.max_tokens)
    return figures


def _params(temperature: float, max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)


def _lengths(
    llm: LLM, prompts: Sequence[BenchPrompt], temperature: float, plan: Plan
) -> dict[str, AcceptedLengths]:
    params = [_params(temperature, plan.max_tokens, seed) for seed in range(len(prompts))]
    done = llm.generate([prompt.token_ids for prompt in prompts], params)
    by_category: dict[str, list[Generation]] = {"all": done}
    for prompt, generation in zip(prompts, done, strict=True):
        if prompt.category != "all":
            by_category.setdefault(prompt.category, []).append(generation)
    return {
        category: accepted_lengths(g.records for g in generations)
        for category, generations in by_category.items()
    }


def _speed(llm: LLM, prompts: Sequence[BenchPrompt], batch: int, max_tokens: int) -> float:
    """Tokens per second over all prompts, `batch` at a time, greedy."""
    count, start = 0, time.perf_counter()
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        params = _params(0.0, max_tokens, seed=0)
        done = llm.generate([prompt.token_ids for prompt in group], params)
        count += sum(len(g.records) for g in done)
    return count / (time.perf_counter() - start)


def _shares(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> dict[str, float]:
    before = dict(llm.worker.times.seconds)
    _speed(llm, prompts, 1, max_tokens)
    spent = {name: llm.worker.times.seconds[name] - before[name] for name in before}
    total = sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}
