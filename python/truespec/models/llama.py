"""The decoder of every built family: Llama, Mistral, Qwen2, Qwen3.

One definition: families differ in optional parameters that `LayerWeights` carries. Knows no
requests, no sampling and no memory planning.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from truespec.batch import ForwardBatch, ModelOutput
from truespec.kernels.api import (
    AttentionRows,
    DecoderStack,
    KernelSet,
    KVBuffers,
    PackedLinear,
    StackShape,
    Weight,
)
from truespec.kernels.reference_weights import narrow

from .config import ModelConfig


class CausalLM:
    """A decoder with its embedding and head.

    Attributes:
        config: what it is.
        kernels: what it computes with; drafters are packed with the same.
        shape: sizes and rope tables of its layers.
        embed_weight: [vocab, hidden] as stored; drafters embed with it.
        head_weight: [vocab, hidden] as stored; `embed_weight` itself where they are tied.
        head: the packed head; drafters project with it.
        norm: [hidden] fp32 weight of the final norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelSet,
        *,
        shape: StackShape,
        embed_weight: Weight,
        stack: DecoderStack,
        norm: Tensor,
        head_weight: Weight,
    ) -> None:
        """Take packed layers and pack the head."""
        self.config = config
        self.kernels = kernels
        self.shape = shape
        self.embed_weight = embed_weight
        self.head_weight = head_weight
        self.head = kernels.linear(head_weight)
        self.norm = norm
        self._stack = stack

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_layers

    def embed(self, token_ids: Tensor) -> Tensor:
        """[m] int64 ids -> [m, hidden] fp32."""
        return self.kernels.embedding(self.embed_weight, token_ids)

    def forward(
        self, batch: ForwardBatch, kv: KVBuffers, capture: tuple[int, ...] = ()
    ) -> ModelOutput:
        """Run all layers on the rows of a batch, writing their K/V.

        Args:
            kv: buffers of this model's layers.
            capture: layers whose output (residual stream) to return, ascending; -1 is the
                embedding, `num_layers - 1` the last layer's output before the final norm.
        """
        rows = AttentionRows(
            positions=batch.positions,
            row_to_req=batch.row_to_req,
            out_slots=batch.out_slots,
            page_table=batch.page_table,
            kv_lens=batch.kv_lens,
            tail_starts=batch.tail_starts,
            tail_slots=batch.tail_slots,
        )
        x = self.embed(batch.token_ids)
        return ModelOutput(*self._stack.forward(x, rows, kv, capture=capture, final_norm=self.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] rows after the final norm -> [n, vocab] fp32, newly allocated."""
        return self.head(hidden)

    def head_rows(self, token_ids: Tensor, weight_type: str | None = None) -> PackedLinear:
        """A head over some of the vocabulary: output i is the logit of `token_ids[i]` ([n]).

        Args:
            weight_type: block type of its weight; `None` keeps the target's own.
        """
        data = self.head_weight.data[token_ids]
        shape = (len(token_ids), self.config.hidden_size)
        rows = replace(self.head_weight, data=data, shape=shape)
        return self.kernels.linear(narrow(rows, weight_type))
