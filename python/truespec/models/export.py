"""Writing a model as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from truespec.kernels.reference_weights import widen
from truespec.layers.rope import RopeParameters, inverse_frequencies

from .checkpoint import Checkpoint
from .config import FAMILIES, ModelConfig
from .fields import CheckpointError
from .layer_weights import layer_shape
from .loader import EMBED, HEAD, NORM

EXPORT_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# What every published Llama 3 checkpoint with a rope scaling says beside its factor.
_LLAMA3 = RopeParameters(type="llama3", original_max_positions=8192)


def export_model(checkpoint: Checkpoint, config: ModelConfig, directory: Path, dtype: str) -> None:
    """Write config.json, generation_config.json and model.safetensors into `directory`.

    Args:
        dtype: a key of `EXPORT_TYPES`.

    Raises:
        CheckpointError: the checkpoint is incomplete, or cannot be said in config.json.
        ValueError: the dtype is unknown.
    """
    if dtype not in EXPORT_TYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(EXPORT_TYPES)}")
    fields = config_fields(config, dtype)
    tensors = _tensors(checkpoint, config, EXPORT_TYPES[dtype])
    checkpoint.check_all_used()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", fields)
    generation: dict[str, object] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        **config.sampling_defaults,
    }
    write_json(directory / "generation_config.json", generation)


def config_fields(config: ModelConfig, dtype: str) -> dict[str, object]:
    """The fields of a config.json that describe `config`."""
    architecture = next(name for name, family in FAMILIES.items() if family.name == config.family)
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope.theta,
        "rope_parameters": _rope_fields(config.rope, config.head_dim),
        "attention_bias": _attention_bias(config),
        "mlp_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def write_json(path: Path, fields: dict[str, object]) -> None:
    """`fields` as an indented file, those that are `None` included."""
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tensors(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name, in `dtype`."""
    shape, table = layer_shape(config), (config.vocab_size, config.hidden_size)
    matrices, vectors = {EMBED: table}, {NORM: config.hidden_size}
    if not config.tie_word_embeddings:
        matrices[HEAD] = table
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        matrices |= {prefix + name: size for name, size in shape.matrices.items()}
        vectors |= {prefix + name: size for name, size in shape.vectors.items()}
    return {
        name: widen(checkpoint.weight(name, size)).to(dtype) for name, size in matrices.items()
    } | {name: checkpoint.vector(name, size).to(dtype) for name, size in vectors.items()}


def _attention_bias(config: ModelConfig) -> bool:
    """The flag that gives the layers the biases they have.

    Raises:
        CheckpointError: no config.json says so.
    """
    family = next(family for family in FAMILIES.values() if family.name == config.family)
    for flag in (False, True):
        qkv = flag if family.qkv_bias is None else family.qkv_bias
        o = flag if family.o_bias is None else family.o_bias
        if (qkv, o) == (config.qkv_bias, config.o_bias):
            return flag
    raise CheckpointError(
        f"{config.family} with qkv_bias {config.qkv_bias} and o_bias {config.o_bias} has no "
        "spelling in config.json"
    )


def _rope_fields(rope: RopeParameters, head_dim: int) -> dict[str, object]:
    """`rope_parameters` in the spelling of transformers 5."""
    if rope.freq_divisors and rope.type == "default":
        rope = _as_llama3(rope, head_dim)
    if rope.freq_divisors:
        raise CheckpointError(f"rope_freqs.weight beside a {rope.type} scaling has no config.json")
    fields: dict[str, object] = {"rope_theta": rope.theta, "rope_type": rope.type}
    if rope.type != "default":
        fields["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_max_positions
    if rope.type == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor}
        fields |= {"high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return fields


def _as_llama3(rope: RopeParameters, head_dim: int) -> RopeParameters:
    """The llama3 scaling that gives explicit divisors.

    Raises:
        CheckpointError: they are not of that kind.
    """
    named = RopeParameters(
        theta=rope.theta,
        type="llama3",
        factor=max(rope.freq_divisors),
        original_max_positions=_LLAMA3.original_max_positions,
        low_freq_factor=_LLAMA3.low_freq_factor,
        high_freq_factor=_LLAMA3.high_freq_factor,
    )
    wanted = inverse_frequencies(rope, head_dim)
    if not torch.allclose(inverse_frequencies(named, head_dim), wanted, rtol=1e-5, atol=0):
        raise CheckpointError(
            "rope_freqs.weight is not Llama 3's scaling: config.json cannot say it"
        )
    return named
