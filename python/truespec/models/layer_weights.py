"""Reading one Llama-like layer from a checkpoint. Targets and drafters share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truespec.kernels.api import LayerWeights, StackShape
from truespec.layers.rope import rope_tables

from .checkpoint import Checkpoint
from .config import ModelConfig


def stack_shape(config: ModelConfig) -> StackShape:
    """The sizes that all layers of a model share, with its rope tables."""
    cos, sin = rope_tables(config.rope, config.head_dim, config.context_length)
    return StackShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        attention_scale=config.head_dim**-0.5,
        rope_cos=cos,
        rope_sin=sin,
    )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Tensor names of a layer under its prefix, with their shapes.

    Attributes:
        matrices: name -> [n, k].
        vectors: name -> size.
    """

    matrices: dict[str, tuple[int, int]]
    vectors: dict[str, int]


def layer_shape(config: ModelConfig, *, attention_input: int | None = None) -> LayerShape:
    """What a layer of `config` consists of.

    Args:
        attention_input: inputs of q, k and v where they are not hidden_size.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, q_size = attention_input or hidden, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj.weight": (q_size, wide),
        "self_attn.k_proj.weight": (kv_size, wide),
        "self_attn.v_proj.weight": (kv_size, wide),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    vectors = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if config.qkv_bias:
        vectors["self_attn.q_proj.bias"] = q_size
        vectors |= {"self_attn.k_proj.bias": kv_size, "self_attn.v_proj.bias": kv_size}
    if config.o_bias:
        vectors["self_attn.o_proj.bias"] = hidden
    if config.qk_norm:
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        vectors |= dict.fromkeys(names, config.head_dim)
    return LayerShape(matrices, vectors)


def read_layer(
    checkpoint: Checkpoint,
    prefix: str,
    config: ModelConfig,
    *,
    attention_input: int | None = None,
    has_input_norm: bool = True,
) -> LayerWeights:
    """The weights of the layer whose names start with `prefix` (ending in a dot).

    Args:
        attention_input: inputs of q, k and v where they are not hidden_size.
        has_input_norm: False for a layer that takes its input as it is.

    Raises:
        CheckpointError: a tensor is missing, misshapen or of a type that is not built.
    """
    shape = layer_shape(config, attention_input=attention_input)
    matrices = {
        name: checkpoint.weight(prefix + name, size) for name, size in shape.matrices.items()
    }
    vectors = {
        name: checkpoint.vector(prefix + name, size)
        for name, size in shape.vectors.items()
        if has_input_norm or name != "input_layernorm.weight"
    }
    return LayerWeights(
        input_norm=vectors.get("input_layernorm.weight"),
        qkv=(
            matrices["self_attn.q_proj.weight"],
            matrices["self_attn.k_proj.weight"],
            matrices["self_attn.v_proj.weight"],
        ),
        qkv_bias=_joined_bias(vectors) if config.qkv_bias else None,
        q_norm=vectors.get("self_attn.q_norm.weight"),
        k_norm=vectors.get("self_attn.k_norm.weight"),
        o=matrices["self_attn.o_proj.weight"],
        o_bias=vectors.get("self_attn.o_proj.bias"),
        post_norm=vectors["post_attention_layernorm.weight"],
        gate=matrices["mlp.gate_proj.weight"],
        up=matrices["mlp.up_proj.weight"],
        down=matrices["mlp.down_proj.weight"],
    )


def _joined_bias(vectors: dict[str, Tensor]) -> Tensor:
    return torch.cat([vectors[f"self_attn.{part}_proj.bias"] for part in "qkv"])
