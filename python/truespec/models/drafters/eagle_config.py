"""What an EAGLE head is, from the config dialects that are around."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from truespec.models.config import ModelConfig
from truespec.models.drafters.checkpoint import (
    layer_config,
    refuse,
    refuse_windows,
    target_layers,
)
from truespec.models.fields import CheckpointError, Fields

logger = logging.getLogger(__name__)

# Fields that change the forward pass of published variants and are not built.
REFUSED = (
    "final_logit_softcapping",
    "quantization_config",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "kv_lora_rank",
    "mlp_bias",
)
# Where the captured layers are named, and what turns each convention into "output of layer i".
LAYER_FIELDS = (
    ("eagle_aux_hidden_state_layer_ids", 0),
    ("target_layer_ids", 0),
    ("aux_hidden_state_layer_ids", -1),
)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of an EAGLE head.

    Attributes:
        layer: sizes of its layers.
        target_layer_ids: id i is the output of target layer i, -1 the embedding. Empty for
            EAGLE-1/2, which reads the target's final hidden state.
        norm_before_residual: the residual stream starts from the normed feature.
        norm_output: the normed output is carried to the next step.
    """

    layer: ModelConfig
    target_layer_ids: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False


def eagle3_config(
    fields: Fields, target: ModelConfig, num_taps: int, has: Callable[[str], bool]
) -> EagleConfig:
    """Parse an EAGLE-3 config.

    Args:
        fields: see `read_fields`.
        target: of the model it drafts for.
        num_taps: target layers whose outputs enter `fc`, from its shape.
        has: whether the checkpoint has a tensor of this name.

    Raises CheckpointError naming the field that is missing, does not fit or is not built.
    """
    refuse_unbuilt(fields)
    layers = _captured_layers(fields, target)
    if len(layers) != num_taps:
        raise CheckpointError(
            f"{fields.source}: fc takes {num_taps} target layers, the config names {len(layers)}"
        )
    return EagleConfig(
        layer=layer_config(fields, target, lambda name: has(f"layers.0.{name}")),
        target_layer_ids=layers,
        norm_before_residual=fields.flag("norm_before_residual", default=False),
        norm_output=fields.flag("norm_output", default=False),
    )


def eagle1_config(fields: Fields, target: ModelConfig, has: Callable[[str], bool]) -> EagleConfig:
    """Parse an EAGLE-1/2 config; arguments and errors as `eagle3_config`."""
    refuse_unbuilt(fields)
    return EagleConfig(layer=layer_config(fields, target, lambda name: has(f"layers.0.{name}")))


def refuse_unbuilt(fields: Fields) -> None:
    """Raise for a variant whose layers are not Llama's."""
    refuse(fields, REFUSED)
    refuse_windows(fields)
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "silu")


def _captured_layers(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """The captured layers of the one field that names them, or the reference's choice."""
    named = [(name, shift) for name, shift in LAYER_FIELDS if fields.get(name) is not None]
    if not named:
        n = target.num_layers
        layers: tuple[int, ...] = (1, n // 2 - 1, n - 4)  # the inputs of layers 2, n / 2 and n - 3
        if sorted(set(layers)) != list(layers):
            names = ", ".join(name for name, _ in LAYER_FIELDS)
            raise CheckpointError(
                f"{fields.source}: none of {names} is given, and a target of {n} layers has no "
                "default"
            )
        logger.info("%s: no captured layers named, outputs of %s", fields.source, layers)
        return layers
    (name, shift), *others = named
    layers = target_layers(fields, name, shift, target, last=True)
    for other, other_shift in others:
        if target_layers(fields, other, other_shift, target, last=True) != layers:
            raise CheckpointError(f"{fields.source}: {name} and {other} name different layers")
    return layers
