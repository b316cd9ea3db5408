"""Writing a DSpark checkpoint: DeepSpec's tensor names, bf16, and a config.json in dialect A."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .dspark_model import DSparkModel
from .target import Target

COPIED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
    "mlp_bias",
)


def export_dspark(model: DSparkModel, target: Target, draft_vocab: Tensor, path: Path) -> None:
    """Write `config.json` and `model.safetensors`; an older export at `path` is replaced whole."""
    partial, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(checkpoint_tensors(model, draft_vocab), partial / "model.safetensors")
    config = json.dumps(checkpoint_config(model, target), indent=2)
    (partial / "config.json").write_text(config + "\n")
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


@torch.no_grad()
def checkpoint_tensors(model: DSparkModel, draft_vocab: Tensor) -> dict[str, Tensor]:
    """Tensors by checkpoint name: parameters in bf16, `d2t` [DV] int64 (target id - draft id)."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors["fc.weight"] = tensors["fc.weight"] / model.tap_scale
    out = {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    out["d2t"] = draft_vocab - torch.arange(len(draft_vocab))
    return out


def checkpoint_config(model: DSparkModel, target: Target) -> dict[str, object]:
    """The config.json of the checkpoint."""
    shape, dims = model.shape, model.dims
    return {name: target.config[name] for name in COPIED if name in target.config} | {
        "architectures": ["LlamaDSparkModel"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "head_dim": dims.head_dim,
        "rope_theta": dims.rope_theta,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": False,
        "block_size": shape.block_size,
        "mask_token_id": None,
        "target_layer_ids": list(shape.target_layer_ids),
        "num_target_layers": int(target.number("num_hidden_layers")),
        "layer_types": ["full_attention"] * shape.num_layers,
        "draft_vocab_size": shape.draft_vocab_size,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
