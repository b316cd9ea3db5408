"""What a block drafter (DSpark, DFlash) is, from the config dialects that are around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from truespec.models.config import ModelConfig
from truespec.models.drafters.checkpoint import (
    layer_config,
    refuse,
    refuse_windows,
    target_layers,
)
from truespec.models.fields import Fields

MarkovType = Literal["vanilla", "gated", "rnn"]

# Fields that change the forward pass of published variants and are not built.
REFUSED = (
    "final_logit_softcapping",
    "output_multiplier",
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "selector_rank",
    "gru_hidden_dim",
    "n_routed_experts",
    "num_local_experts",
    "kv_lora_rank",
    "is_causal",
)
PROJECTORS = (None, "dspark", "dflash")
MARKOV_W1 = "markov_head.markov_w1.weight"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Shape of a block drafter.

    Attributes:
        layer: sizes of its layers.
        target_layer_ids: id i is the output of target layer i, -1 the embedding.
        block_size: rows of a block.
        skip_first_row: row i predicts the token at its own position, so row 0 is no draft
            (DFlash); otherwise row i predicts the token after its position (DSpark).
        mask_token_id: its target embedding fills rows 1..; `None` with a `mask_embedding` tensor.
        markov_rank: 0 without a Markov head.
        confidence_with_markov: the confidence head also sees the previous token.
        confidence_temperatures: [block_size] of sequential temperature scaling, if calibrated.
    """

    layer: ModelConfig
    target_layer_ids: tuple[int, ...]
    block_size: int
    skip_first_row: bool
    mask_token_id: int | None
    markov_rank: int
    markov_type: MarkovType
    confidence_with_markov: bool
    confidence_temperatures: tuple[float, ...] | None

    @property
    def num_drafts(self) -> int:
        """Drafts per block."""
        return self.block_size - 1 if self.skip_first_row else self.block_size


def block_config(fields: Fields, target: ModelConfig, has: Callable[[str], bool]) -> BlockConfig:
    """Parse a block drafter's config.

    Args:
        fields: see `read_fields`.
        target: of the model it drafts for.
        has: whether the checkpoint has a tensor of this name.

    Raises CheckpointError naming the field that is missing, does not fit or is not built.
    """
    _refuse(fields)
    has_markov = has(MARKOV_W1)
    mask_name = "mask_token_id" if fields.has("mask_token_id") else "noise_token_id"
    explicit = fields.has("target_layer_ids")
    # The second spelling names the layer whose INPUT is captured.
    name, shift = ("target_layer_ids", 0) if explicit else ("aux_hidden_state_layer_ids", -1)
    return BlockConfig(
        layer=layer_config(fields, target, lambda tensor: has(f"layers.0.{tensor}")),
        target_layer_ids=target_layers(fields, name, shift, target, last=False),
        block_size=fields.integer("block_size"),
        skip_first_row=_skips_first_row(fields, has_markov=has_markov),
        mask_token_id=fields.integer(mask_name) if fields.get(mask_name) is not None else None,
        markov_rank=fields.integer("markov_rank") if has_markov else 0,
        markov_type=_markov_type(fields) if has_markov else "vanilla",
        confidence_with_markov=fields.flag("confidence_head_with_markov", default=has_markov),
        confidence_temperatures=_temperatures(fields),
    )


def _refuse(fields: Fields) -> None:
    refuse(fields, REFUSED)
    if fields.get("projector_type") not in PROJECTORS:
        raise fields.error("projector_type", "dspark or dflash")
    refuse_windows(fields)


def _skips_first_row(fields: Fields, *, has_markov: bool) -> bool:
    if fields.has("sample_from_anchor"):
        return not fields.flag("sample_from_anchor", default=True)
    # NOTE: a head-less checkpoint of the DSpark classes keeps DSpark's row rule; only the
    # original DFlash classes predict at their own position.
    return not has_markov and "DSpark" not in str(fields.get("architectures"))


def _markov_type(fields: Fields) -> MarkovType:
    kind = fields.get("markov_head_type")
    found = next((known for known in get_args(MarkovType) if known == kind), None)
    if found is None:
        raise fields.error("markov_head_type", "vanilla, gated or rnn")
    return cast(MarkovType, found)


def _temperatures(fields: Fields) -> tuple[float, ...] | None:
    values = fields.get("confidence_temperatures")
    if values is None:
        return None
    size = fields.integer("block_size")
    if not isinstance(values, list) or len(values) != size or min(values) <= 0:
        raise fields.error("confidence_temperatures", f"{size} positive numbers")
    return tuple(float(value) for value in values)
