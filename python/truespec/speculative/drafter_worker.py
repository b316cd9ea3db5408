"""What all workers with draft weights share: which requests to draft for, and the draft cache."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.core import Req
from truespec.kernels.api import KVBuffers
from truespec.speculative.base import EngineParts, SpecWorker, WorkerPlan, chain_draft
from truespec.speculative.chains import DraftSampler
from truespec.speculative.contract import Draft


class Drafting(NamedTuple):
    """The requests of a step that get drafts.

    Attributes:
        batch: the whole step.
        places: which of its sampling chunks these are, ascending.
        chunks: these chunks. counts: drafts that each may have, at least 1.
    """

    batch: Batch
    places: list[int]
    chunks: list[ReqChunk]
    counts: list[int]

    @property
    def other_rows(self) -> int:
        """Rows of the step beside the roots of these requests."""
        return sum(chunk.num_rows for chunk in self.batch.chunks) - len(self.chunks)

    @property
    def reqs(self) -> list[Req]:
        """Their requests."""
        return [chunk.req for chunk in self.chunks]


class DrafterWorker(SpecWorker):
    """A worker whose drafts come from a model; subclasses fill in `make_drafts` and `extend`."""

    def __init__(self, parts: EngineParts, plan: WorkerPlan, target_ids: Tensor | None) -> None:
        """`target_ids`: see `DraftSampler`."""
        super().__init__(parts, plan)
        self.sampler = DraftSampler(self.info.vocab_size, target_ids, self.is_rejection)

    @abstractmethod
    def make_drafts(self, drafting: Drafting) -> Draft:
        """Roots of all sampling chunks, and drafts of those that get some."""

    def draft(self, batch: Batch) -> Draft:
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        counts = [self.planned_drafts(chunk) for chunk in chunks]
        places = [place for place, count in enumerate(counts) if count]
        if not places:
            return chain_draft(batch, [[] for _ in chunks], [[] for _ in chunks])
        return self.make_drafts(
            Drafting(batch, places, [chunks[p] for p in places], [counts[p] for p in places])
        )

    @property
    def draft_kv(self) -> KVBuffers:
        """K/V of the draft layers."""
        assert self.runner.pool.draft is not None, "the pool has no draft layers"
        return self.runner.pool.draft
