"""The target as its own drafter: runs the engine's own steps ahead of time."""

from __future__ import annotations

from pathlib import Path

from harness import Engine, engine_config, target

from truespec.batch import Batch
from truespec.config import EngineConfig
from truespec.engine.rows import prepare_rows
from truespec.models.llama import CausalLM
from truespec.speculative.base import SpecWorker, StepState, WorkerPlan, chain_draft
from truespec.speculative.contract import Draft
from truespec.speculative.registry import build_from_plan
from truespec.speculative.sampling import process_step


class SelfDrafter(SpecWorker):
    """Drafts token by token what the target samples, edits and filters included."""

    needs_drafter = False

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        return WorkerPlan(make=cls, num_drafts=4, num_draft_slots=4)

    def draft(self, batch: Batch) -> Draft:
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        counts = [self.planned_drafts(chunk) for chunk in chunks]
        drafts: list[list[int]] = [[] for _ in chunks]
        for step in range(max(counts, default=0)):
            draft = chain_draft(batch, drafts, [[0.0] * len(ids) for ids in drafts])
            rows = prepare_rows(batch, draft.token_ids, draft.parents, draft.cu_rows, self.cache)
            output = self.runner.forward(rows.forward)
            logits = self.runner.logits(output.hidden[rows.sample_rows])
            masks = [None] * len(draft.token_ids)
            sampled = process_step(batch, draft, rows, logits, self.info.vocab_size, masks).sampled
            lasts = (draft.cu_rows[1:] - 1).tolist()
            for ids, count, last in zip(drafts, counts, lasts, strict=True):
                if step < count:
                    ids.append(int(sampled.token_ids[last]))
        return chain_draft(batch, drafts, [[-1.0] * len(ids) for ids in drafts])

    def extend(self, state: StepState) -> None:
        """The target's cache is the draft cache."""


def self_drafting_engine(family: str) -> Engine:
    """An engine whose drafts are the target's own choices."""
    config = engine_config(chunk=16)
    model = target(family)
    worker, resolved = build_from_plan(config, model, SelfDrafter.plan(config, model, None))
    return Engine(worker, resolved)
