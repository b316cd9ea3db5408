"""EAGLE heads: a layer or a few that extrapolate the target's hidden states.

EAGLE-3 (arXiv 2503.01840) fuses outputs of several target layers; EAGLE-1/2 (arXiv 2401.15077,
2406.16858) reads the final hidden state. Symbols: e embedding of the next token, f feature of the
position, g output that is carried to the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from truespec.batch import ModelOutput
from truespec.kernels.api import (
    AttentionRows,
    DecoderStack,
    KVBuffers,
    LayerWeights,
    PackedLinear,
    Weight,
)
from truespec.models.drafters.checkpoint import DrafterCheckpoint, read_fields, target_ids
from truespec.models.drafters.eagle_config import EagleConfig, eagle1_config, eagle3_config
from truespec.models.drafters.recurrent import RecurrentDrafter, own_embedding, own_head
from truespec.models.fields import CheckpointError
from truespec.models.layer_weights import read_layer, stack_shape
from truespec.models.llama import CausalLM

TAP_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
Q_PROJ = "layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True, slots=True)
class _Parts:
    """What both kinds of heads have."""

    config: EagleConfig
    target: CausalLM
    fc: PackedLinear
    stack: DecoderStack
    embedding: Weight
    head: PackedLinear
    ids: Tensor | None

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.target.kernels.rms_norm(x, weight, self.config.layer.rms_norm_eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.target.kernels.embedding(self.embedding, token_ids)


@dataclass(frozen=True, slots=True)
class _Norms:
    """Norm weights of an EAGLE-3 head, [H] fp32 each.

    Attributes:
        taps: per target layer, before `fc`; empty without.
        fused: [m * H] over all target layers, before `fc`; `None` without.
        embedded, feature: of the two halves of the first layer's input.
        output: before the head.
    """

    taps: Sequence[Tensor]
    fused: Tensor | None
    embedded: Tensor
    feature: Tensor
    output: Tensor


class Eagle3Drafter(RecurrentDrafter):
    """f = fc(features); the first layer attends with [norm(e); norm(f)], its residual is f."""

    def __init__(self, parts: _Parts, norms: _Norms) -> None:
        self._parts, self._norms = parts, norms
        self.layer, self.capture = parts.config.layer, parts.config.target_layer_ids
        self.target_ids = parts.ids

    def inputs(self, output: ModelOutput, rows: Tensor) -> Tensor:
        assert output.features is not None, "EAGLE-3 captures target layers"
        features, parts = output.features[rows], self._parts
        if self._norms.fused is not None:
            features = parts.norm(features, self._norms.fused)
        if self._norms.taps:
            taps = features.chunk(len(self._norms.taps), dim=1)
            features = torch.cat(
                [
                    parts.norm(tap.contiguous(), weight)
                    for tap, weight in zip(taps, self._norms.taps, strict=True)
                ],
                dim=1,
            )
        return parts.fc(features.contiguous())

    def forward(
        self, hidden: Tensor, token_ids: Tensor, rows: AttentionRows, kv: KVBuffers
    ) -> Tensor:
        parts, norms = self._parts, self._norms
        feature = parts.norm(hidden, norms.feature)
        embedded = parts.norm(parts.embed(token_ids), norms.embedded)
        out, _ = parts.stack.forward(
            feature if parts.config.norm_before_residual else hidden,
            rows,
            kv,
            first_input=torch.cat([embedded, feature], dim=1),
            final_norm=norms.output if parts.config.norm_output else None,
        )
        return out

    def logits(self, carried: Tensor) -> Tensor:
        if self._parts.config.norm_output:
            return self._parts.head(carried)
        return self._parts.head(self._parts.norm(carried, self._norms.output))


class Eagle1Drafter(RecurrentDrafter):
    """The layers run on fc([e; f]) and predict the target's next final hidden state."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self.layer, self.capture, self.target_ids = parts.config.layer, (), parts.ids

    def inputs(self, output: ModelOutput, rows: Tensor) -> Tensor:
        return output.hidden[rows]

    def forward(
        self, hidden: Tensor, token_ids: Tensor, rows: AttentionRows, kv: KVBuffers
    ) -> Tensor:
        joined = torch.cat([self._parts.embed(token_ids), hidden], dim=1)
        out, _ = self._parts.stack.forward(self._parts.fc(joined), rows, kv)
        return out

    def logits(self, carried: Tensor) -> Tensor:
        return self._parts.head(carried)


def load_eagle(
    path: Path, target: CausalLM, num_extra_positions: int, weight_type: str | None = None
) -> RecurrentDrafter | None:
    """Read an EAGLE checkpoint for `target`; `None` when the tensors are no EAGLE head's.

    Args:
        num_extra_positions: how far a draft may reach past the context.
        weight_type: block type of its matrices; `None` leaves them as they are stored.

    Raises CheckpointError when a tensor or field does not fit, naming both values.
    """
    checkpoint = DrafterCheckpoint(path, _own_name, weight_type)
    if not (checkpoint.has("fc.weight") and checkpoint.has(Q_PROJ)):
        return None
    if checkpoint.has("hidden_norm.weight"):  # of a block drafter
        return None
    load = _load_eagle3 if checkpoint.has("layers.0.hidden_norm.weight") else _load_eagle1
    drafter = load(checkpoint, path, target, num_extra_positions)
    checkpoint.check_all_used()
    return drafter


def _load_eagle3(
    checkpoint: DrafterCheckpoint, path: Path, target: CausalLM, num_extra_positions: int
) -> Eagle3Drafter:
    fields, hidden = read_fields(path), target.config.hidden_size
    width = checkpoint.shape("fc.weight")[-1]
    num_taps = width // hidden
    if width % hidden:
        raise CheckpointError(
            f"{path.name}: fc takes {width} inputs, expected a multiple of the target's "
            f"hidden size {hidden}"
        )
    config = eagle3_config(fields, target.config, num_taps, checkpoint.has)
    vector = checkpoint.vector
    has_tap_norms = checkpoint.has("fc_norm.0.weight")
    norms = _Norms(
        taps=[vector(f"fc_norm.{i}.weight", hidden) for i in range(num_taps)]
        if has_tap_norms
        else [],
        fused=vector("input_norm.weight", width) if checkpoint.has("input_norm.weight") else None,
        embedded=vector("layers.0.input_layernorm.weight", hidden),
        feature=vector("layers.0.hidden_norm.weight", hidden),
        output=vector("norm.weight", hidden),
    )
    layers = [
        read_layer(
            checkpoint,
            f"layers.{index}.",
            config.layer,
            attention_input=None if index else 2 * hidden,
            has_input_norm=index > 0,
        )
        for index in range(config.layer.num_layers)
    ]
    fc = target.kernels.linear(checkpoint.weight("fc.weight", (hidden, width)))
    ids = target_ids(checkpoint, fields, target.config)
    return Eagle3Drafter(
        _parts(checkpoint, config, target, fc, layers, ids, num_extra_positions), norms
    )


def _load_eagle1(
    checkpoint: DrafterCheckpoint, path: Path, target: CausalLM, num_extra_positions: int
) -> Eagle1Drafter:
    hidden = target.config.hidden_size
    config = eagle1_config(read_fields(path), target.config, checkpoint.has)
    layers = [
        read_layer(checkpoint, f"layers.{index}.", config.layer, has_input_norm=index > 0)
        for index in range(config.layer.num_layers)
    ]
    bias = checkpoint.vector("fc.bias", hidden) if checkpoint.has("fc.bias") else None
    fc = target.kernels.linear(checkpoint.weight("fc.weight", (hidden, 2 * hidden)), bias)
    return Eagle1Drafter(_parts(checkpoint, config, target, fc, layers, None, num_extra_positions))


def _parts(
    checkpoint: DrafterCheckpoint,
    config: EagleConfig,
    target: CausalLM,
    fc: PackedLinear,
    layers: list[LayerWeights],
    ids: Tensor | None,
    num_extra_positions: int,
) -> _Parts:
    layer = config.layer
    long = replace(layer, context_length=layer.context_length + num_extra_positions)
    return _Parts(
        config=config,
        target=target,
        fc=fc,
        stack=target.kernels.decoder_stack(layers, stack_shape(long)),
        embedding=own_embedding(checkpoint, "embed_tokens.weight", target),
        head=own_head(checkpoint, "lm_head.weight", target, ids),
        ids=ids,
    )


def _own_name(stored: str) -> str | None:
    name = stored.removeprefix("model.")
    if name.startswith("midlayer."):
        name = name.replace("midlayer.", "layers.0.", 1)
    part = name.removesuffix(".weight")
    name = f"{TAP_NORMS[part]}.weight" if part in TAP_NORMS else name
    return None if name == "t2d" else name
