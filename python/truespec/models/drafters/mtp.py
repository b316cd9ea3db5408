"""Multi-token-prediction heads ("nextn"): join a hidden state and the next token, run one block.

Dense DeepSeek-V3 style (arXiv 2412.19437), MiMo, MiMo-V2 and Step-3.5. One head can be rolled on
its own output; several are run one per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from truespec.batch import ModelOutput
from truespec.kernels.api import AttentionRows, DecoderStack, KVBuffers, PackedLinear, Weight
from truespec.models.config import ModelConfig
from truespec.models.drafters.checkpoint import (
    DrafterCheckpoint,
    layer_config,
    read_fields,
    refuse,
    target_ids,
    tensor_names,
)
from truespec.models.drafters.eagle_config import refuse_unbuilt
from truespec.models.drafters.mtp_config import MtpDialect, find_dialect, own_name
from truespec.models.drafters.recurrent import RecurrentDrafter, own_embedding, own_head
from truespec.models.fields import CheckpointError
from truespec.models.layer_weights import read_layer, stack_shape
from truespec.models.llama import CausalLM

WINDOWED = ("hybrid_layer_pattern", "sliding_window_size")  # MiMo-V2 with attention windows


@dataclass(frozen=True, slots=True)
class _Weights:
    """Of one head; norms are [H] fp32."""

    join: PackedLinear
    embedding_norm: Tensor
    hidden_norm: Tensor
    stack: DecoderStack
    norm: Tensor
    embedding: Weight
    head: PackedLinear


class MtpHead(RecurrentDrafter):
    """u = join [norm(e); norm(h)], one decoder block, final norm, head."""

    def __init__(
        self,
        dialect: MtpDialect,
        layer: ModelConfig,
        target: CausalLM,
        weights: _Weights,
        ids: Tensor | None,
    ) -> None:
        self.layer, self.target_ids = layer, ids
        self.capture = () if dialect.reads_normed else (target.num_layers - 1,)
        self._dialect, self._target, self._weights = dialect, target, weights

    def inputs(self, output: ModelOutput, rows: Tensor) -> Tensor:
        if self._dialect.reads_normed:
            return output.hidden[rows]
        assert output.features is not None, "the last layer's output is captured"
        return output.features[rows]

    def forward(
        self, hidden: Tensor, token_ids: Tensor, rows: AttentionRows, kv: KVBuffers
    ) -> Tensor:
        weights, dialect = self._weights, self._dialect
        embedded = self._target.kernels.embedding(weights.embedding, token_ids)
        if dialect.zero_first_embedding:
            embedded = embedded * (rows.positions > 0).unsqueeze(1)
        pair = [
            self._norm(embedded, weights.embedding_norm),
            self._norm(hidden, weights.hidden_norm),
        ]
        joined = weights.join(torch.cat(pair if dialect.embedding_first else pair[::-1], dim=1))
        norm = weights.norm if dialect.carries_normed else None
        out, _ = weights.stack.forward(joined, rows, kv, final_norm=norm)
        return out

    def logits(self, carried: Tensor) -> Tensor:
        if self._dialect.carries_normed:
            return self._weights.head(carried)
        return self._weights.head(self._norm(carried, self._weights.norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._target.kernels.rms_norm(x, weight, self.layer.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class MtpHeads:
    """All heads of a checkpoint, in order.

    Attributes:
        is_chained: head j reads what head j - 1 carried, else the target's hidden state.
    """

    heads: list[MtpHead]
    is_chained: bool


class _MtpCheckpoint(DrafterCheckpoint):
    """Adds the dialect's offset to norm weights."""

    def __init__(
        self, path: Path, dialect: MtpDialect, num_target_layers: int, weight_type: str | None
    ) -> None:
        super().__init__(
            path, lambda stored: own_name(dialect, num_target_layers, stored), weight_type
        )
        self._offset = dialect.norm_offset

    def vector(self, name: str, size: int) -> Tensor:
        values = super().vector(name, size)
        return values + self._offset if "norm" in name else values


def load_mtp(
    path: Path, target: CausalLM, num_extra_positions: int, weight_type: str | None = None
) -> MtpHeads | None:
    """Read the heads for `target`; `None` when the tensors are no such heads'.

    Args:
        num_extra_positions: how far a draft may reach past the context.
        weight_type: block type of their matrices; `None` leaves them as they are stored.

    Raises CheckpointError when a tensor or field does not fit, naming both values.
    """
    dialect = find_dialect(tensor_names(path))
    if dialect is None:
        return None
    checkpoint = _MtpCheckpoint(path, dialect, target.num_layers, weight_type)
    fields = read_fields(path)
    refuse_unbuilt(fields)
    refuse(fields, WINDOWED)
    count = 0
    while checkpoint.has(f"{count}.join.weight"):
        count += 1
    if count == 0:
        raise CheckpointError(
            f"{path.name}: the {dialect.name} heads do not follow the target's "
            f"{target.num_layers} layers"
        )
    # The target's own config may be the only one there is, with the target's layers.
    layer = layer_config(fields, target.config, lambda name: checkpoint.has(f"0.block.{name}"))
    layer = replace(layer, num_layers=1)
    ids = target_ids(checkpoint, fields, target.config)
    targets_head = target.head if ids is None else target.head_rows(ids, weight_type)
    heads = []
    for j in range(count):
        has_head = checkpoint.has(f"{j}.head.weight")
        head = own_head(checkpoint, f"{j}.head.weight", target, ids) if has_head else targets_head
        weights = _weights(checkpoint, j, layer, target, head, num_extra_positions)
        heads.append(MtpHead(dialect, layer, target, weights, ids))
    checkpoint.check_all_used()
    return MtpHeads(heads, dialect.is_chained)


def _weights(
    checkpoint: DrafterCheckpoint,
    index: int,
    layer: ModelConfig,
    target: CausalLM,
    head: PackedLinear,
    num_extra_positions: int,
) -> _Weights:
    hidden, kernels = layer.hidden_size, target.kernels
    long = replace(layer, context_length=layer.context_length + num_extra_positions)
    block = read_layer(checkpoint, f"{index}.block.", layer)
    return _Weights(
        join=kernels.linear(checkpoint.weight(f"{index}.join.weight", (hidden, 2 * hidden))),
        embedding_norm=checkpoint.vector(f"{index}.embedding_norm.weight", hidden),
        hidden_norm=checkpoint.vector(f"{index}.hidden_norm.weight", hidden),
        stack=kernels.decoder_stack([block], stack_shape(long)),
        norm=checkpoint.vector(f"{index}.norm.weight", hidden),
        embedding=own_embedding(checkpoint, f"{index}.embed_tokens.weight", target),
        head=head,
    )
