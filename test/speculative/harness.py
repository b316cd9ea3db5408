"""Engines on tiny random targets, and what a request must return: the records of plain decoding.

Every worker runs through the same scheduler, step by step, without a tokenizer.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, product
from pathlib import Path
from typing import TypeVar

from tiny import tiny_model
from tiny_tokens import TINY_TOKENS
from truespec import env
from truespec.config import Algorithm, EngineConfig
from truespec.core import Finish, TokenRecord
from truespec.kernels import kernel_set
from truespec.kernels.api import KernelSet
from truespec.message import Abort, Submit
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model
from truespec.params import LOGPROB_MODES, LogprobParams, SamplingParams
from truespec.scheduler.scheduler import Scheduler
from truespec.speculative.base import SpecWorker
from truespec.speculative.registry import build_from_plan, worker_class
from truespec.tokenizer.acceptance import Acceptance, acceptance_of, joined

FAMILIES = ("llama", "qwen2", "qwen3")
VOCAB_SIZE, NUM_LAYERS, HIDDEN_SIZE = 48, 3, 64
T = TypeVar("T")
PLENTY = 4096  # tokens of a pool in which nobody is ever retracted
DETAILED = LogprobParams(top_k=5, token_ids=(7, 1, 7), modes=LOGPROB_MODES, details=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a scenario.

    Attributes:
        arrival: scheduler step at which it is submitted.
        abort_after: output tokens after which it is aborted; `None` lets it end.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    abort_after: int | None = None


@dataclass(slots=True)
class Result:
    """What came back for a job."""

    records: list[TokenRecord] = field(default_factory=list)
    prompt_records: list[TokenRecord] = field(default_factory=list)
    finish: Finish | None = None
    num_cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Output ids."""
        return [record.token_id for record in self.records]

    @property
    def acceptance(self) -> Acceptance:
        """Counts over the kept records."""
        return acceptance_of(self.records)

    @property
    def facts(self) -> list[tuple[object, ...]]:
        """Of each output token what must not depend on how it was computed."""
        return [(r.token_id, r.modes, r.rank, r.entropy) for r in self.records]


class Engine:
    """A worker behind the real scheduler."""

    def __init__(self, worker: SpecWorker, config: EngineConfig) -> None:
        self.worker = worker
        self.scheduler = Scheduler(worker, max_prefill_rows=config.chunked_prefill_size)
        self._rids = count()

    @property
    def num_retractions(self) -> int:
        """Since start."""
        return self.scheduler.stats().num_retractions

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Finish every job; afterwards no page, row or request may be left."""
        names = [f"{next(self._rids)}" for _ in jobs]
        results = {name: Result() for name in names}
        for step in count():
            for name, job in zip(names, jobs, strict=True):
                if job.arrival == step:
                    self.scheduler.submit(Submit(name, list(job.prompt_ids), job.params))
            for output in self.scheduler.step():
                result = results[output.rid]
                assert result.finish is None, "a second last message"
                result.records += output.records
                result.prompt_records += output.prompt_records
                result.finish, result.num_cached_tokens = output.finish, output.num_cached_tokens
            for name, job in zip(names, jobs, strict=True):
                self._abort_when_due(name, job, results[name])
            if all(result.finish is not None for result in results.values()):
                break
            assert step < 4000, "the engine makes no progress"
        self.scheduler.check_idle()
        return [results[name] for name in names]

    def _abort_when_due(self, name: str, job: Job, result: Result) -> None:
        due = job.abort_after is not None and len(result.records) >= job.abort_after
        if due and result.finish is None:
            output = self.scheduler.abort(Abort(name, "asked"))
            assert output is not None, "a running request must be there to abort"
            result.finish = output.finish


@lru_cache(maxsize=1)
def kernels() -> KernelSet:
    """The kernels of this machine, one thread."""
    return kernel_set(env.cpu_kernels(), "cpu", cache_dir=env.cache_dir(), num_threads=1)


@lru_cache(maxsize=len(FAMILIES))
def target(family: str) -> CausalLM:
    """A random target of `family`."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_model(
            family,
            seed=len(family),
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
        ).save_pretrained(directory)
        return load_model(Path(directory), kernels())


def engine_config(
    algorithm: Algorithm = "NONE",
    *,
    drafter: Path | None = None,
    pool: int = PLENTY,
    chunk: int = 256,
    prefix: bool = True,
    **speculative: int | float | str | bool | None,
) -> EngineConfig:
    """Options of an engine; `speculative` are fields of the config without their prefix."""
    named = {
        name if name.startswith("enable_") else f"speculative_{name}": value
        for name, value in speculative.items()
    }
    return EngineConfig(
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
        disable_radix_cache=not prefix,
        max_running_requests=8,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=None if drafter is None else str(drafter),
        **named,  # type: ignore[arg-type]  # names and types are the caller's
    )


def make_engine(family: str, config: EngineConfig) -> Engine:
    """The engine that a server with this config runs on a tiny target."""
    model = target(family)
    path = config.speculative_draft_model_path
    plan = worker_class(config).plan(config, model, None if path is None else Path(path))
    worker, resolved = build_from_plan(config, model, plan, load_tokens=lambda: TINY_TOKENS)
    return Engine(worker, resolved)


@lru_cache(maxsize=len(FAMILIES))
def _plain_engine(family: str) -> Engine:
    return make_engine(family, engine_config(prefix=False))


@lru_cache(maxsize=4096)
def plain(family: str, prompt_ids: tuple[int, ...], params: SamplingParams) -> Result:
    """The request decoded plainly, alone and without any cache."""
    return _plain_engine(family).run([Job(prompt_ids, params)])[0]


def expect_plain(family: str, jobs: Sequence[Job], results: Sequence[Result]) -> None:
    """Assert that every job returned what plain decoding returns, to the bit."""
    for job, result in zip(jobs, results, strict=True):
        wanted = plain(family, job.prompt_ids, job.params)
        assert result.prompt_records == wanted.prompt_records
        if job.abort_after is not None:
            assert result.finish is not None
            assert result.facts == wanted.facts[: len(result.facts)]
            continue
        assert result.token_ids == wanted.token_ids, job.params
        assert result.facts == wanted.facts, job.params
        assert result.finish == wanted.finish


def total(results: Sequence[Result]) -> Acceptance:
    """Acceptance over all results."""
    return joined([result.acceptance for result in results])


def make_prompts(num: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 1 to 70 tokens; most begin alike, some repeat themselves."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(7)]
    prompts = []
    for index in range(num):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        start = (shared[: rng.choice((0, 16, 33, 40))], phrase * 3, shared)[index % 3]
        prompts.append(tuple(start + own))
    return prompts


PARAMS: dict[str, Sequence[dict[str, object]]] = {
    "temperature": ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.5}),
    "filter": ({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05, "top_p": 0.95}),
    "edit": (
        {},
        {"frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"repetition_penalty": 1.2, "logit_bias": ((5, 2.0), (9, -3.0))},
        {"min_tokens": 9, "bad_words_ids": ((4, 11), (6,))},
        {"allowed_token_ids": tuple(range(2, 40, 3))},
    ),
    "end": ({"ignore_eos": True}, {"ignore_eos": True, "stop_token_ids": (8, 23)}, {}),
    "logprobs": (
        {"logprobs": DETAILED},
        {"logprobs": LogprobParams(top_k=2)},
        {"logprobs": LogprobParams(prompt_top_k=3, start=2)},
        {},
    ),
}


def make_params(max_tokens: int) -> list[SamplingParams]:
    """Parameter sets in which every pair of settings meets."""
    return [
        SamplingParams(max_tokens=max_tokens, seed=1000 + index, **merged)  # type: ignore[arg-type]
        for index, merged in enumerate(
            {name: value for part in row for name, value in part.items()}
            for row in pairwise_rows(list(PARAMS.values()))
        )
    ]


def pairwise_rows(axes: Sequence[Sequence[T]], seed: int = 0) -> list[tuple[T, ...]]:
    """Rows with one value of each axis so that any two values of two axes meet in some row."""
    rng = random.Random(seed)
    left = {
        ((a, i), (b, j))
        for a, b in product(range(len(axes)), repeat=2)
        if a < b
        for i, j in product(range(len(axes[a])), range(len(axes[b])))
    }
    rows = []
    while left:
        tries = [_row_through(min(left), [len(axis) for axis in axes], rng) for _ in range(60)]
        best = max(tries, key=lambda row: len(_pairs(row) & left))
        left -= _pairs(best)
        rows.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return rows


Pair = tuple[tuple[int, int], tuple[int, int]]


def _row_through(pair: Pair, sizes: Sequence[int], rng: random.Random) -> list[int]:
    row = [rng.randrange(size) for size in sizes]
    for axis, index in pair:
        row[axis] = index
    return row


def _pairs(row: Sequence[int]) -> set[Pair]:
    places = list(enumerate(row))
    return {(left, right) for at, left in enumerate(places) for right in places[at + 1 :]}
