"""Writing and reading a block drafter: DeepSpec's tensor names and config.json, bf16.

DFlash is DSpark with a Markov rank of 0 and without confidences, as DeepSpec has it.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .checkpoint_dir import stored_tensors, write_checkpoint
from .config import DSparkShape
from .dspark_model import BlockModel, DSparkModel, dims_of
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


def export_block(model: BlockModel, target: Target, draft_vocab: Tensor, path: Path) -> None:
    """Write `config.json` and `model.safetensors`; an older export at `path` is replaced whole."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors["fc.weight"] = tensors["fc.weight"] / model.tap_scale
    write_checkpoint(path, stored_tensors(tensors, draft_vocab), checkpoint_config(model, target))


@torch.no_grad()
def read_dspark(path: Path, target: Target) -> tuple[DSparkModel, Tensor]:
    """Model and draft vocabulary [DV] int64 of an exported checkpoint; `tap_scale` is 1."""
    model = DSparkModel(read_shape(path), dims_of(target))
    tensors, draft_vocab = read_tensors(path)
    model.load_state_dict(tensors | {"tap_scale": model.tap_scale})
    return model, draft_vocab


def read_shape(path: Path) -> DSparkShape:
    """Shape of an exported checkpoint; the Markov rank of a DFlash drafter is 0.

    Raises ValueError for checkpoints that this package did not train.
    """
    config = json.loads((path / "config.json").read_text())
    try:
        return DSparkShape(
            target_layer_ids=tuple(config["target_layer_ids"]),
            num_layers=config["num_hidden_layers"],
            num_kv_heads=config["num_key_value_heads"],
            block_size=config["block_size"],
            draft_vocab_size=config["draft_vocab_size"],
            markov_rank=config["markov_rank"],
        )
    except KeyError as error:
        raise ValueError(
            f"{path} is no DSpark or DFlash drafter made by truespec train: its config has no "
            f"{error}"
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters by name, bf16, and the draft vocabulary [DV] int64 of an exported checkpoint."""
    tensors = load_file(path / "model.safetensors")
    offsets = tensors.pop("d2t")
    return tensors, offsets + torch.arange(len(offsets))


def checkpoint_config(model: BlockModel, target: Target) -> dict[str, object]:
    """The config.json of the checkpoint."""
    shape, dims, rank = model.shape, model.dims, model.markov_weight().shape[1]
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
        "sample_from_anchor": True,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": rank > 0,
        "confidence_head_with_markov": rank > 0,
    }
