"""Plain decoding: the worker that drafts nothing. The template does the rest."""

from __future__ import annotations

from pathlib import Path

from truespec.batch import Batch
from truespec.config import EngineConfig
from truespec.models.llama import CausalLM
from truespec.speculative.base import SpecWorker, StepState, WorkerPlan, chain_draft
from truespec.speculative.contract import Draft


class PlainWorker(SpecWorker):
    """One token per request and step, through the same verify and logprobs as any other worker."""

    needs_drafter = False

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        return WorkerPlan(make=cls)

    def draft(self, batch: Batch) -> Draft:
        drafts: list[list[int]] = [[] for chunk in batch.chunks if chunk.samples]
        return chain_draft(batch, drafts, [[] for _ in drafts])

    def extend(self, state: StepState) -> None:
        """No draft cache."""
