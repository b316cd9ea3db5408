"""Runs the target model over prepared rows. Knows no request and no algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from truespec.batch import ForwardBatch, ModelOutput
from truespec.kvcache import KVPool
from truespec.models.llama import CausalLM


@dataclass(slots=True)
class ForwardCounts:
    """Work done so far; tests guard speed with these, not with clocks.

    Attributes:
        num_forwards: target forward passes.
        num_rows: rows over all passes.
        num_logit_rows: rows that went through the head.
    """

    num_forwards: int = 0
    num_rows: int = 0
    num_logit_rows: int = 0


@dataclass(slots=True)
class ModelRunner:
    """The target model on its pool."""

    model: CausalLM
    pool: KVPool
    counts: ForwardCounts = field(default_factory=ForwardCounts)

    def forward(self, rows: ForwardBatch, capture: tuple[int, ...] = ()) -> ModelOutput:
        """Hidden states of every row, with the outputs of the captured layers; K/V is written."""
        self.counts.num_forwards += 1
        self.counts.num_rows += rows.token_ids.shape[0]
        return self.model.forward(rows, self.pool.target, capture)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] fp32 -> [n, vocab] fp32 raw logits, a new tensor."""
        self.counts.num_logit_rows += hidden.shape[0]
        return self.model.logits(hidden)

    def move_kv(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Move target K/V between slots, [n] int64 each, in order."""
        self.model.kernels.move_kv(self.pool.target, src_slots, dst_slots)
