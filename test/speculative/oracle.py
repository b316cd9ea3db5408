"""A drafter that knows the plain continuation and errs on demand; chains and trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from harness import VOCAB_SIZE, Engine, Job, engine_config, plain, target

from tiny_tokens import TINY_TOKENS
from truespec.batch import Batch, ReqChunk
from truespec.config import EngineConfig
from truespec.models.llama import CausalLM
from truespec.speculative.base import (
    EngineParts,
    SpecWorker,
    StepState,
    WorkerPlan,
    chain_draft,
)
from truespec.speculative.contract import Draft
from truespec.speculative.registry import build_from_plan

Key = tuple[tuple[int, ...], int | None]  # prompt and seed: a scenario uses each pair once
Rule = Callable[[Sequence[int], int], list[int]]  # right tokens, place in the output -> drafts


def perfect(right: Sequence[int], place: int) -> list[int]:
    """Every draft is what plain decoding says."""
    return list(right)


def wrong(right: Sequence[int], place: int) -> list[int]:
    """Every draft is another token."""
    return [(token_id + 1) % VOCAB_SIZE for token_id in right]


def erring(rate: float, seed: int = 0) -> Rule:
    """Each draft is wrong with probability `rate`, the same ones in every run."""

    def rule(right: Sequence[int], place: int) -> list[int]:
        rng = random.Random(f"{seed} {place} {list(right[:1])}")
        return [(t + (rng.random() < rate)) % VOCAB_SIZE for t in right]

    return rule


def guessing(right: Sequence[int], place: int) -> list[int]:
    """Drafts out of nowhere."""
    rng = random.Random(place * 31 + len(right))
    return [rng.randrange(VOCAB_SIZE) for _ in right]


class OracleWorker(SpecWorker):
    """Replays the continuations of the jobs it was told of.

    Args:
        width: 1 drafts a chain; more puts each right token among so many siblings, every one of
            them with children of its own.
    """

    needs_drafter = False

    def __init__(
        self,
        parts: EngineParts,
        plan: WorkerPlan,
        continuations: dict[Key, list[int]],
        rule: Rule,
        width: int,
    ) -> None:
        super().__init__(parts, plan)
        self._continuations, self._rule, self._width = continuations, rule, width

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        raise AssertionError("made by oracle_engine")

    def draft(self, batch: Batch) -> Draft:
        chains = [self._chain(chunk) for chunk in batch.chunks if chunk.samples]
        if self._width == 1:
            return chain_draft(batch, chains, [[-1.0] * len(ids) for ids in chains])
        return self._trees(batch, chains)

    def extend(self, state: StepState) -> None:
        """No cache."""

    def _chain(self, chunk: ReqChunk) -> list[int]:
        req = chunk.req
        rest = self._continuations[tuple(req.prompt_ids), req.params.seed][len(req.output_ids) :]
        depth = self.planned_drafts(chunk) // self._width
        return self._rule(rest[:depth], len(req.output_ids))

    def _trees(self, batch: Batch, chains: list[list[int]]) -> Draft:
        """Level by level: the chain's token in a place that moves on, decoys around it."""
        roots = [chunk.req.last_token_id for chunk in batch.chunks if chunk.samples]
        token_ids: list[int] = []
        parents: list[int] = []
        cu_rows = [0]
        for root, chain in zip(roots, chains, strict=True):
            level = [len(token_ids)]
            token_ids.append(root)
            parents.append(-1)
            right = level[0]
            for depth, token_id in enumerate(chain):
                place = (depth + token_id) % self._width
                rows = list(range(len(token_ids), len(token_ids) + self._width))
                for i in range(self._width):
                    token_ids.append((token_id + i - place) % VOCAB_SIZE)
                    # Only the right place must hang on the right parent.
                    parents.append(right if i == place else level[(i + depth) % len(level)])
                level, right = rows, rows[place]
            cu_rows.append(len(token_ids))
        return Draft(
            token_ids=torch.tensor(token_ids),
            parents=torch.tensor(parents),
            cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
            logprobs=torch.zeros(len(token_ids)),
        )


def oracle_engine(
    family: str,
    jobs: Sequence[Job],
    rule: Rule,
    *,
    num_drafts: int,
    width: int = 1,
    config: EngineConfig | None = None,
) -> Engine:
    """An engine whose drafter knows the plain outputs of `jobs`."""
    known = {
        (job.prompt_ids, job.params.seed): plain(family, job.prompt_ids, job.params).token_ids
        for job in jobs
    }
    plan = WorkerPlan(
        make=lambda parts, plan: OracleWorker(parts, plan, known, rule, width),
        num_drafts=num_drafts,
        num_draft_slots=num_drafts,
    )
    worker, resolved = build_from_plan(
        config or engine_config(), target(family), plan, load_tokens=lambda: TINY_TOKENS
    )
    return Engine(worker, resolved)


def numbered(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with seeds of their own, by which an oracle tells them apart."""
    return [
        replace(job, params=replace(job.params, seed=500 + index)) for index, job in enumerate(jobs)
    ]
