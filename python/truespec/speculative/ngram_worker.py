"""NGRAM: drafts by looking the last tokens up in the request's own text. Needs no weights."""

from __future__ import annotations

from pathlib import Path

from truespec.batch import Batch
from truespec.config import EngineConfig
from truespec.core import Req
from truespec.models.llama import CausalLM
from truespec.speculative.base import (
    EngineParts,
    SpecWorker,
    StepState,
    WorkerPlan,
    chain_draft,
)
from truespec.speculative.contract import Draft

MAX_NGRAM = 4
MIN_NGRAM = 2
DEFAULT_NUM_DRAFTS = 5


class NgramIndex:
    """For every n-gram of a token sequence, where it was followed last; grows with the sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: list[int]) -> None:
        """Add tokens; an n-gram counts once a token follows it."""
        for token_id in token_ids:
            end = len(self.token_ids)
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self._next[tuple(self.token_ids[end - size :])] = end
            self.token_ids.append(token_id)

    def lookup(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known n-gram at the end; may be empty."""
        end = len(self.token_ids)
        for size in range(min(MAX_NGRAM, end), MIN_NGRAM - 1, -1):
            start = self._next.get(tuple(self.token_ids[end - size :]))
            if start is not None:
                return self.token_ids[start : start + count]
        return []


class NgramWorker(SpecWorker):
    """Prompt look-up decoding: each draft is what followed the same words before."""

    needs_drafter = False
    options = frozenset({"speculative_num_draft_tokens"})

    def __init__(self, parts: EngineParts, plan: WorkerPlan) -> None:
        super().__init__(parts, plan)
        self._indexes: dict[str, NgramIndex] = {}

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        rows = config.speculative_num_draft_tokens
        num_drafts = DEFAULT_NUM_DRAFTS if rows is None else rows - 1
        return WorkerPlan(make=cls, num_drafts=num_drafts, num_draft_slots=num_drafts)

    def draft(self, batch: Batch) -> Draft:
        drafts = []
        for chunk in batch.chunks:
            if chunk.samples:
                count = self.planned_drafts(chunk)
                drafts.append(self._index(chunk.req).lookup(count) if count else [])
        return chain_draft(batch, drafts, [[0.0] * len(ids) for ids in drafts])

    def extend(self, state: StepState) -> None:
        """Nothing to fill: the index follows the request's own tokens when it drafts."""

    def forget(self, req: Req) -> None:
        super().forget(req)
        self._indexes.pop(req.rid, None)

    def _index(self, req: Req) -> NgramIndex:
        index = self._indexes.get(req.rid)
        if index is None:
            index = self._indexes[req.rid] = NgramIndex()
            index.extend(req.prompt_ids)
        index.extend(req.output_ids[len(index.token_ids) - len(req.prompt_ids) :])
        return index
