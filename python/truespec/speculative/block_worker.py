"""What DSpark and DFlash share: a block pass on injected target features.

The draft cache covers exactly the positions of the target's cache, in the same slots. The block's
own K/V goes to the slots after them and is overwritten by what gets committed there.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from truespec.batch import ReqChunk
from truespec.config import EngineConfig
from truespec.kernels.api import AttentionRows, ContextRows
from truespec.kvcache import LayerSpec
from truespec.layers.sampler import SamplingRows
from truespec.models.drafters.block import BlockDrafter, load_block_drafter
from truespec.models.llama import CausalLM
from truespec.speculative.backlog import FreshRows
from truespec.speculative.base import EngineParts, WorkerPlan
from truespec.speculative.chains import ChainDrafts
from truespec.speculative.contract import Draft
from truespec.speculative.drafter_worker import DrafterWorker, Drafting, draft_weight_type


class Blocks(NamedTuple):
    """The block pass of a step.

    Attributes:
        anchors: [n] int64 last known tokens.
        rows: of the blocks.
        context: what the draft KV lacks before them.
        num_steps: k, the longest draft wanted.
    """

    anchors: Tensor
    rows: AttentionRows
    context: ContextRows | None
    num_steps: int


class BlockWorker(DrafterWorker):
    """Drafts a block per request in one pass (`draft_blocks`)."""

    options = frozenset({"speculative_num_draft_tokens", "speculative_accept"})

    def __init__(self, parts: EngineParts, plan: WorkerPlan, drafter: BlockDrafter) -> None:
        super().__init__(parts, plan, drafter.target_ids)
        self.drafter = drafter
        self.capture = drafter.config.target_layer_ids

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        assert path is not None, "a block drafter has weights"
        drafter = cls.load(config, target, path)
        shape = drafter.config
        return WorkerPlan(
            make=lambda parts, plan: cls(parts, plan, drafter),
            num_drafts=num_block_drafts(config, shape.num_drafts),
            num_draft_slots=shape.block_size,
            draft_layers=LayerSpec(
                shape.layer.num_layers, shape.layer.num_kv_heads, shape.layer.head_dim
            ),
        )

    @classmethod
    def load(cls, config: EngineConfig, target: CausalLM, path: Path) -> BlockDrafter:
        """The drafter, as far as the options change it. Raises ValueError when it does not fit."""
        return load_block_drafter(path, target, weight_type=draft_weight_type(config, target))

    @abstractmethod
    def draft_blocks(self, blocks: Blocks, rows: SamplingRows) -> ChainDrafts:
        """Run the blocks and choose their tokens.

        Args:
            rows: parameters of the first drafts, [n].
        """

    def make_drafts(self, drafting: Drafting) -> Draft:
        longest = max(drafting.counts)
        roots = [chunk.req.last_token_id for chunk in drafting.chunks]
        anchors = torch.from_numpy(np.array(roots, np.int64))
        # Rows that nobody wants cost more than the little that the others gain by seeing them.
        wanted = self.drafter.config.num_drafts if self.planner.costs is None else longest
        rows = self._block_rows(drafting.chunks, self.drafter.first_row + wanted)
        context = None if drafting.fresh is None else self._context(drafting.fresh)
        blocks = Blocks(anchors, rows, context, longest)
        drafts = self.draft_blocks(blocks, self.sampler.rows(drafting.chunks))
        return self.draft_of(drafting, drafts)

    def run(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """[n, k, H] states of the rows that draft, [n, k, DV] logits of them."""
        made = self.drafter.run(blocks.anchors, blocks.rows, self.draft_kv, blocks.context)
        first, end = self.drafter.first_row, self.drafter.first_row + blocks.num_steps
        hidden, logits = (part[:, first:end].contiguous() for part in made)
        return hidden, logits

    def extend_rows(self, fresh: FreshRows) -> None:
        self.drafter.stack.write_context(self._context(fresh), self.draft_kv)

    def describe(self) -> dict[str, object]:
        size = {"block_size": self.drafter.config.block_size}
        return super().describe() | size | {"target_layer_ids": list(self.capture)}

    def _context(self, fresh: FreshRows) -> ContextRows:
        placed = self.cache.place(fresh.reqs, fresh.firsts, fresh.lengths)
        positions, slots = torch.from_numpy(placed.positions), torch.from_numpy(placed.slots)
        return self.drafter.context(fresh.source, positions, slots)

    def _block_rows(self, chunks: list[ReqChunk], size: int) -> AttentionRows:
        """A block per chunk: `size` positions from the anchor's on, each seeing all of them."""
        starts = [chunk.start for chunk in chunks]
        placed = self.cache.place([chunk.req for chunk in chunks], starts, [size] * len(chunks))
        ends = [start + size for start in starts for _ in range(size)]
        return AttentionRows(
            positions=torch.from_numpy(placed.positions),
            row_to_req=torch.from_numpy(placed.row_to_req),
            out_slots=torch.from_numpy(placed.slots),
            page_table=self.cache.shared_table,
            kv_lens=torch.from_numpy(np.array(ends, np.int32)),
        )


def num_block_drafts(config: EngineConfig, most: int) -> int:
    """Drafts per step: what the block has, or fewer where the option says so.

    Raises ValueError when the option asks for more.
    """
    asked = config.speculative_num_draft_tokens
    if asked is None:
        return most
    if not 2 <= asked <= most + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens is {asked}, expected 2 to {most + 1} "
            f"(the root and the {most} drafts of a block)"
        )
    return asked - 1
