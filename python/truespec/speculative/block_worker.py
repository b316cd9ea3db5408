"""What DSpark and DFlash share: a block pass on injected target features.

The draft cache covers exactly the positions of the target's cache, in the same slots. The block's
own K/V goes to the slots after them and is overwritten by what gets committed there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.config import EngineConfig
from truespec.kernels.api import AttentionRows, KVBuffers
from truespec.kvcache import LayerSpec
from truespec.models.drafters.block import BlockDrafter, load_block_drafter
from truespec.models.llama import CausalLM
from truespec.speculative.base import (
    EngineParts,
    SpecWorker,
    StepState,
    WorkerPlan,
    chain_draft,
)
from truespec.speculative.contract import Draft


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """Drafts of n blocks of k steps.

    Attributes:
        token_ids: [n, k] int64 target ids.
        logprobs: [n, k] fp32 the drafter's own.
        confidences: [n, k] fp32 or `None`.
    """

    token_ids: Tensor
    logprobs: Tensor
    confidences: Tensor | None


class BlockWorker(SpecWorker):
    """Drafts a block per request in one pass, then chooses its tokens (`choose`)."""

    def __init__(self, parts: EngineParts, plan: WorkerPlan, drafter: BlockDrafter) -> None:
        super().__init__(parts, plan)
        self.drafter = drafter
        self.capture = drafter.config.target_layer_ids

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        assert path is not None, "a block drafter has weights"
        drafter = load_block_drafter(path, target)
        shape = drafter.config
        asked = config.speculative_num_draft_tokens
        num_drafts = shape.num_drafts if asked is None else min(shape.num_drafts, asked - 1)
        return WorkerPlan(
            make=lambda parts, plan: cls(parts, plan, drafter),
            num_drafts=num_drafts,
            num_draft_slots=shape.block_size,
            draft_layers=LayerSpec(
                shape.layer.num_layers, shape.layer.num_kv_heads, shape.layer.head_dim
            ),
        )

    @abstractmethod
    def choose(self, hidden: Tensor, anchors: Tensor, chunks: list[ReqChunk]) -> BlockChoice:
        """Tokens of the blocks: hidden [n, G, H], anchors [n] int64, n chunks."""

    def draft(self, batch: Batch) -> Draft:
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        counts = [self.planned_drafts(chunk) for chunk in chunks]
        active = [chunk for chunk, count in zip(chunks, counts, strict=True) if count]
        if not active:
            return chain_draft(batch, [[] for _ in chunks], [[] for _ in chunks])
        anchors = torch.tensor([chunk.req.last_token_id for chunk in active])
        hidden = self.drafter.hidden(anchors, self._block_rows(active), self._kv)
        choice = self.choose(hidden, anchors, active)
        ids, logprobs = iter(choice.token_ids.tolist()), iter(choice.logprobs.tolist())
        return chain_draft(
            batch,
            [next(ids)[:count] if count else [] for count in counts],
            [next(logprobs)[:count] if count else [] for count in counts],
        )

    def extend(self, state: StepState) -> None:
        assert state.output.features is not None, "a block drafter captures target layers"
        done = state.committed
        features = state.output.features[done.rows]
        self.drafter.inject(features, done.positions, done.slots, self._kv)

    @property
    def _kv(self) -> KVBuffers:
        assert self.runner.pool.draft is not None, "the pool has no draft layers"
        return self.runner.pool.draft

    def _block_rows(self, chunks: list[ReqChunk]) -> AttentionRows:
        """One block per chunk: G positions from the anchor's on, each seeing all of them."""
        size = self.drafter.config.block_size
        starts = np.array([chunk.start for chunk in chunks])
        positions = (starts[:, None] + np.arange(size)).reshape(-1)
        row_to_req = np.repeat(np.arange(len(chunks)), size)
        slots, page_table = self.cache.slots([c.req for c in chunks], row_to_req, positions)
        return AttentionRows(
            positions=torch.from_numpy(positions.astype(np.int32)),
            row_to_req=torch.from_numpy(row_to_req.astype(np.int32)),
            out_slots=torch.from_numpy(slots),
            page_table=torch.from_numpy(page_table),
            kv_lens=torch.from_numpy(np.repeat(starts + size, size).astype(np.int32)),
        )
