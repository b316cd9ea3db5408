"""The template of every worker: draft -> target forward -> verify -> logprobs -> extend.

A worker contains only how it drafts and how it extends its cache. Plain decoding is the worker
that drafts nothing. There is one forward, one verify and one logprob helper for all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from truespec.batch import Batch, LogprobTable, ModelOutput, ReqChunk, StepOutput
from truespec.config import EngineConfig
from truespec.core import Req
from truespec.engine.rows import StepRows, prepare_rows, take_rows
from truespec.engine.runner import ModelRunner
from truespec.engine.worker import ModelInfo, Worker
from truespec.kvcache import KVCache, LayerSpec
from truespec.models.llama import CausalLM
from truespec.speculative.contract import Draft, Verdict
from truespec.speculative.failures import failures
from truespec.speculative.grammars import Grammars
from truespec.speculative.logprobs import prompt_logprobs, verdict_logprobs
from truespec.speculative.planner import Planner
from truespec.speculative.rejection import draw_coins, verify_rejection
from truespec.speculative.sampling import ProcessedStep, process_step
from truespec.speculative.verify import verify
from truespec.utils.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What every worker is built from."""

    runner: ModelRunner
    cache: KVCache
    info: ModelInfo
    config: EngineConfig
    grammars: Grammars


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker needs before memory is given out, and how to make it then.

    Attributes:
        make: builds the worker.
        num_drafts: drafts per request and step at most.
        num_draft_slots: slots beyond the last known token that a step may write.
        draft_layers: KV of the drafter, `None` without any.
        lookahead: tokens after a position that its draft KV depends on.
    """

    make: Callable[[EngineParts, WorkerPlan], SpecWorker]
    num_drafts: int = 0
    num_draft_slots: int = 0
    draft_layers: LayerSpec | None = None
    lookahead: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """The rows of a step whose tokens stay: known rows and accepted drafts, in position order.

    Attributes:
        rows: rows of the forward batch, ascending.
        counts: [number of chunks] how many of them each chunk has.
    """

    rows: list[int]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class StepState:
    """What a worker may use to extend its draft cache after verification.

    Attributes:
        batch, draft, rows: the step as it was laid out.
        output: hidden states and captured features of all rows.
        verdict: by sampling chunk, in order.
        committed: see `Committed`.
    """

    batch: Batch
    draft: Draft
    rows: StepRows
    output: ModelOutput
    verdict: Verdict
    committed: Committed


class SpecWorker(Worker):
    """Runs the template; subclasses fill in `draft` and `extend`.

    Attributes:
        needs_drafter: it runs weights of its own, at a path or shipped for the target.
        capture: target layers whose outputs `extend` needs (see `DecoderStack.forward`).
        num_drafts: drafts per request and step at most.
        options: speculative options it reads; others are refused.
        has_caught_up: the last `draft` had to do what many steps before it left undone.
        times: seconds per phase of `step`.
    """

    needs_drafter: bool = True
    options: frozenset[str] = frozenset()
    capture: tuple[int, ...] = ()
    has_caught_up: bool = False

    def __init__(self, parts: EngineParts, plan: WorkerPlan) -> None:
        self.runner, self.cache, self.info = parts.runner, parts.cache, parts.info
        self.config, self.grammars = parts.config, parts.grammars
        self.is_rejection = parts.config.speculative_accept == "rejection"
        self.num_drafts, self.num_draft_slots = plan.num_drafts, plan.num_draft_slots
        self.planner = Planner(plan.num_drafts, costs=None)
        self.times = Stopwatch("draft", "target", "verify", "logprobs", "extend")
        self._planned: dict[str, int] = {}

    @classmethod
    @abstractmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        """Load the drafter at `path` (`None` only without `needs_drafter`) and say what it needs.

        Raises ValueError when drafter, target and options do not fit.
        """

    @abstractmethod
    def draft(self, batch: Batch) -> Draft:
        """Roots and drafts of the sampling chunks of a batch, in order."""

    @abstractmethod
    def extend(self, state: StepState) -> None:
        """Bring the draft cache up to the committed tokens."""

    def step(self, batch: Batch) -> StepOutput:
        self.times.start()
        constrained = self.grammars.constrain(batch, self.plan_and_draft(batch))
        draft = constrained.draft
        draft_seconds = self.times.lap("draft")
        rows = prepare_rows(batch, draft.token_ids, draft.parents, draft.cu_rows, self.cache)
        output = self.runner.forward(rows.forward, self.capture)
        raw_logits = self.runner.logits(take_rows(output.hidden, rows.sample_rows))
        seconds = self.times.lap("target")
        processed = process_step(
            batch, draft, rows, raw_logits, self.info.vocab_size, constrained.masks
        )
        verdict = self._verify(draft, processed)
        seconds += self.times.lap("verify")
        logprobs = verdict_logprobs(batch, raw_logits, verdict, processed, self.info.vocab_size)
        prompts = prompt_logprobs(batch, rows, output.hidden, self.runner, self.info.vocab_size)
        seconds += self.times.lap("logprobs")
        committed = self._commit_rows(batch, rows, verdict)
        self._observe(draft, verdict)
        self.extend(StepState(batch, draft, rows, output, verdict, committed))
        seconds += self.times.lap("extend")
        self._learn_costs(batch, len(rows.sample_rows), seconds, draft_seconds)
        ends = self.grammars.advance(batch, verdict)
        found = failures(batch, draft, rows, verdict, raw_logits, output.hidden)
        problems = [
            self.grammars.problem(c.req) or p for c, p in zip(batch.chunks, found, strict=True)
        ]
        return _to_host(batch, draft, verdict, ends, problems, logprobs, prompts)

    def settle(self, req: Req) -> None:
        """Nothing is put off."""

    def forget(self, req: Req) -> None:
        self.grammars.forget(req)
        self.planner.forget(req.rid)

    def describe(self) -> dict[str, object]:
        return {"algorithm": self.config.speculative_algorithm, "num_drafts": self.num_drafts}

    def plan_and_draft(self, batch: Batch) -> Draft:
        """Choose draft lengths, then draft."""
        self._plan_drafts(batch)
        return self.draft(batch)

    def most_drafts(self, chunk: ReqChunk) -> int:
        """Drafts that are reserved and asked for, whatever they cost."""
        cap, asked = min(chunk.max_drafts, self.num_drafts), chunk.req.params.num_draft_tokens
        return cap if asked is None else min(cap, asked)

    def planned_drafts(self, chunk: ReqChunk) -> int:
        """Drafts to make for a sampling chunk in this step: of the most, what is worth its cost."""
        return self._planned[chunk.req.rid]

    def _verify(self, draft: Draft, step: ProcessedStep) -> Verdict:
        if not self.is_rejection or draft.logits is None:
            return verify(draft, step.sampled)
        return verify_rejection(
            draft,
            step.logits,
            step.sampled,
            step.rows.temperature,
            draw_coins(step.rows),
            vocab_size=self.info.vocab_size,
        )

    def _plan_drafts(self, batch: Batch) -> None:
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        caps = [self.most_drafts(chunk) for chunk in sampling]
        other_rows = sum(chunk.num_rows for chunk in batch.chunks) - len(sampling)
        counts = self.planner.counts([c.req.rid for c in sampling], caps, other_rows)
        self._planned = {c.req.rid: n for c, n in zip(sampling, counts, strict=True)}

    def _learn_costs(
        self, batch: Batch, num_rows: int, seconds: float, draft_seconds: float
    ) -> None:
        if all(chunk.samples and chunk.num_rows == 1 for chunk in batch.chunks):
            self.planner.learn_costs(
                num_rows=num_rows,
                seconds=seconds,
                counts=list(self._planned.values()),
                draft_seconds=draft_seconds,
                is_typical=not self.has_caught_up,
            )

    def _observe(self, draft: Draft, verdict: Verdict) -> None:
        ranges = pairwise(draft.cu_rows.tolist())
        emitted = verdict.num_tokens.tolist()
        made = zip(self._planned.items(), ranges, emitted, strict=True)
        for (rid, planned), (begin, end), count in made:
            if planned:
                self.planner.observe(rid, planned, end - begin - 1, max(0, count - 1))

    def _commit_rows(self, batch: Batch, rows: StepRows, verdict: Verdict) -> Committed:
        """Find the committed rows; accepted tree nodes are moved to their own positions' slots."""
        kept: list[int] = []
        counts: list[int] = []
        paths = zip(verdict.row_index.tolist(), verdict.num_tokens.tolist(), strict=True)
        for chunk, first in zip(batch.chunks, rows.first_rows, strict=False):
            before = len(kept)
            kept += range(first, first + chunk.num_rows)
            if chunk.samples:
                path, count = next(paths)
                kept += [rows.sample_rows[row] for row in path[1:count]]
            counts.append(len(kept) - before)
        committed = Committed(kept, counts)
        if rows.forward.tail_slots is not None:
            self._move_kept(batch, rows.forward.out_slots, committed)
        return committed

    def _move_kept(self, batch: Batch, out_slots: Tensor, committed: Committed) -> None:
        chunks = batch.chunks
        own = self.cache.place(
            [chunk.req for chunk in chunks], [chunk.start for chunk in chunks], committed.counts
        )
        self.runner.move_kv(out_slots[committed.rows], torch.from_numpy(own.slots))


def chain_draft(
    batch: Batch,
    drafts: list[list[int]],
    logprobs: list[list[float]],
    confidences: list[list[float]] | None = None,
) -> Draft:
    """A `Draft` of chains.

    Args:
        batch: its sampling chunks give the roots.
        drafts: target ids per sampling chunk, possibly none.
        logprobs: the drafter's own logprob of each.
        confidences: conditional acceptance of each, where the drafter has it.
    """
    roots = [chunk.req.last_token_id for chunk in batch.chunks if chunk.samples]
    token_ids: list[int] = []
    parents: list[int] = []
    cu_rows = [0]
    for root, ids in zip(roots, drafts, strict=True):
        first = len(token_ids)
        token_ids += [root, *ids]
        parents += [-1, *range(first, first + len(ids))]
        cu_rows.append(len(token_ids))
    return Draft(
        token_ids=torch.from_numpy(np.array(token_ids, np.int64)),
        parents=torch.from_numpy(np.array(parents, np.int64)),
        cu_rows=torch.from_numpy(np.array(cu_rows, np.int32)),
        logprobs=_behind_roots(logprobs, 0.0),
        confidences=None if confidences is None else _behind_roots(confidences, 1.0),
    )


def _behind_roots(values: list[list[float]], at_root: float) -> Tensor:
    """[num_rows] fp32."""
    rows = [value for own in values for value in (at_root, *own)]
    return torch.from_numpy(np.array(rows, np.float32))


def _to_host(
    batch: Batch,
    draft: Draft,
    verdict: Verdict,
    ends: list[int | None],
    problems: list[str | None],
    logprobs: LogprobTable | None,
    prompts: list[list[LogprobTable]],
) -> StepOutput:
    """Lay the verdict of the sampling chunks out over all chunks of the batch."""
    counts = verdict.num_tokens.tolist()
    ids, rows = verdict.token_ids.tolist(), verdict.row_index.tolist()
    draft_logprobs = draft.logprobs.tolist()
    cu = draft.cu_rows.tolist()
    token_ids: list[list[int]] = []
    num_drafts: list[int] = []
    accepted: list[list[float]] = []
    is_complete: list[bool] = []
    table_rows: list[int] = []
    sampling = iter(range(len(counts)))
    for chunk in batch.chunks:
        i = next(sampling) if chunk.samples else -1
        table_rows.append(i)
        end = ends[i] if chunk.samples else None
        is_complete.append(end is not None)
        token_ids.append(ids[i][: counts[i] if end is None else end] if chunk.samples else [])
        num_drafts.append(cu[i + 1] - cu[i] - 1 if chunk.samples else 0)
        # The row of token j >= 1 is the draft that token j - 1 accepted.
        path = rows[i][1 : counts[i]] if chunk.samples else []
        accepted.append([draft_logprobs[row] for row in path])
    return StepOutput(
        token_ids, num_drafts, accepted, problems, is_complete, logprobs, table_rows, prompts
    )
