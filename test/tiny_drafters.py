"""Tiny random drafters in the dialects that are published, written as their tools write them.

Sizes are those of the targets of `speculative/harness.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny import Option

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 64, 112, 4, 2, 16
TARGET_LAYERS = 3
RANK = 8
LAYER_FIELDS: dict[str, object] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
    """A random weight that keeps the size of its inputs."""
    return torch.randn(rows, columns) * spread / columns**0.5


def norm(size: int = HIDDEN) -> Tensor:
    """A random norm weight."""
    return 1 + 0.2 * torch.randn(size)


def layer(
    prefix: str, *, attention_input: int = HIDDEN, qk_norm: bool = False, qkv_bias: bool = False
) -> dict[str, Tensor]:
    """Tensors of one Llama-like block."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "input_layernorm.weight": norm(),
        "post_attention_layernorm.weight": norm(),
        "self_attn.q_proj.weight": matrix(q, attention_input),
        "self_attn.k_proj.weight": matrix(kv, attention_input),
        "self_attn.v_proj.weight": matrix(kv, attention_input),
        "self_attn.o_proj.weight": matrix(HIDDEN, q),
        "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, INNER),
    }
    if qk_norm:
        tensors["self_attn.q_norm.weight"] = norm(HEAD_DIM)
        tensors["self_attn.k_norm.weight"] = norm(HEAD_DIM)
    if qkv_bias:
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"self_attn.{part}_proj.bias"] = 0.2 * torch.randn(size)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> Path:
    """The files of a drafter; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return directory


def rounded(tensor: Tensor, type_name: str) -> Tensor:
    """The values that the gguf library's type gives to a matrix."""
    kind = gguf.GGMLQuantizationType[type_name]
    blocks = gguf.quants.quantize(tensor.float().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def rounded_copy(path: Path, directory: Path, type_name: str) -> Path:
    """A drafter that stores what `type_name` makes of the matrices it multiplies with.

    Those are all whose rows are whole blocks of 32, but for embeddings and the sequential heads.
    """
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        is_kept = "markov" in name or "confidence" in name or "embed_tokens" in name
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0 and not is_kept:
            tensors[name] = rounded(tensor, type_name)
    return write(directory, tensors, json.loads((path / "config.json").read_text(encoding="utf-8")))


def draft_vocabulary(size: int, vocab: int) -> dict[str, Tensor]:
    """d2t (offsets) and t2d of a random subset of the target's ids."""
    kept = torch.randperm(vocab)[:size].sort().values
    is_kept = torch.zeros(vocab, dtype=torch.bool)
    is_kept[kept] = True
    return {"d2t": kept - torch.arange(size), "t2d": is_kept}


def block_tensors(
    num_layers: int,
    num_taps: int,
    *,
    markov: str | None = None,
    confidence: bool = False,
    qk_norm: bool = True,
    draft_vocab: int | None = None,
    vocab: int = VOCAB,
) -> dict[str, Tensor]:
    """Backbone of a block drafter, with the heads that are asked for."""
    size = draft_vocab or vocab
    tensors = {
        "fc.weight": matrix(HIDDEN, num_taps * HIDDEN),
        "hidden_norm.weight": norm(),
        "norm.weight": norm(),
    }
    for index in range(num_layers):
        tensors |= layer(f"layers.{index}.", qk_norm=qk_norm)
    if draft_vocab is not None:
        tensors |= draft_vocabulary(draft_vocab, vocab)
    if markov is not None:
        tensors["markov_head.markov_w1.weight"] = torch.randn(vocab, RANK)
        tensors["markov_head.markov_w2.weight"] = matrix(size, RANK)
    if markov == "gated":
        tensors["markov_head.gate_proj.weight"] = matrix(RANK, HIDDEN + RANK)
        tensors["markov_head.gate_proj.bias"] = torch.randn(RANK)
    if markov == "rnn":
        tensors["markov_head.joint_proj.weight"] = matrix(3 * RANK, 2 * RANK + HIDDEN)
        tensors["markov_head.joint_proj.bias"] = torch.randn(3 * RANK)
    if confidence:
        width = HIDDEN + (RANK if markov is not None else 0)
        tensors["confidence_head.proj.weight"] = 3 * matrix(1, width)
        tensors["confidence_head.proj.bias"] = torch.randn(1)
    return tensors


def dspark(
    directory: Path,
    *,
    block_size: int = 5,
    markov: str = "vanilla",
    confidence: bool = True,
    vocab: int = VOCAB,
    seed: int = 0,
    **fields: Option,
) -> Path:
    """A DSpark drafter as DeepSpec writes it (with frozen copies of the target's tensors)."""
    torch.manual_seed(seed)
    tensors = block_tensors(2, 2, markov=markov, confidence=confidence, vocab=vocab)
    tensors |= {
        "embed_tokens.weight": matrix(vocab, HIDDEN),
        "lm_head.weight": matrix(vocab, HIDDEN),
    }
    config = LAYER_FIELDS | {
        "vocab_size": vocab,
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 2,
        "block_size": block_size,
        "mask_token_id": 47,
        "target_layer_ids": [0, 1],
        "num_target_layers": TARGET_LAYERS,
        "num_anchors": 512,
        "markov_rank": RANK,
        "markov_head_type": markov,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": True,
        "layer_types": ["full_attention"] * 2,
    }
    return write(directory, tensors, config | fields)


def dflash(directory: Path, *, block_size: int = 6, seed: int = 0, **fields: Option) -> Path:
    """A DFlash drafter as z-lab writes it."""
    torch.manual_seed(seed)
    config = LAYER_FIELDS | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": block_size,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": 47, "target_layer_ids": [0, 1]},
    }
    return write(directory, block_tensors(2, 2), config | fields)


def eagle3(
    directory: Path,
    *,
    num_layers: int = 1,
    num_taps: int = 3,
    draft_vocab: int | None = 40,
    first_layer: str = "midlayer",
    qk_norm: bool = False,
    qkv_bias: bool = False,
    tap_norms: str | None = None,
    norm_before_fc: bool = False,
    vocab: int = VOCAB,
    seed: int = 0,
    **fields: Option,
) -> Path:
    """An EAGLE-3 head as SpecForge writes it, with the variants that are around."""
    torch.manual_seed(seed)
    size = draft_vocab or vocab
    tensors = {
        "fc.weight": matrix(HIDDEN, num_taps * HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(size, HIDDEN),
    }
    for index in range(num_layers):
        prefix = f"layers.{index}." if index else f"{first_layer}."
        wide = HIDDEN if index else 2 * HIDDEN
        tensors |= layer(prefix, attention_input=wide, qk_norm=qk_norm, qkv_bias=qkv_bias)
    tensors[f"{first_layer}.hidden_norm.weight"] = norm()
    if draft_vocab is not None:
        tensors |= draft_vocabulary(draft_vocab, vocab)
    if tap_norms is not None:
        names = ("low", "mid", "high") if tap_norms == "aux_norm" else range(num_taps)
        for name in names:
            dot = "_" if tap_norms == "aux_norm" else "."
            tensors[f"{tap_norms}{dot}{name}.weight"] = norm()
    if norm_before_fc:
        tensors["input_norm.weight"] = norm(num_taps * HIDDEN)
    config = LAYER_FIELDS | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": vocab,
        "num_hidden_layers": num_layers,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(range(-1, num_taps - 1)),
            "use_aux_hidden_state": True,
        },
    }
    return write(directory, tensors, config | fields)


def eagle1(directory: Path, *, bias: bool = True, seed: int = 0, **fields: Option) -> Path:
    """An EAGLE-1/2 head."""
    torch.manual_seed(seed)
    tensors = layer("layers.0.")
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = matrix(HIDDEN, 2 * HIDDEN)
    if bias:
        tensors["fc.bias"] = 0.2 * torch.randn(HIDDEN)
    config = LAYER_FIELDS | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    return write(directory, tensors, config | fields)


MTP_NAMES = {
    # prefix, join, norms of embedding and hidden, final norm, prefix of the block
    "mimo": (
        "model.mtp_layers.{}.",
        "input_proj",
        ("token_layernorm", "hidden_layernorm"),
        "final_layernorm",
        "",
    ),
    "mimo_v2": ("model.mtp.layers.{}.", "eh_proj", ("enorm", "hnorm"), "final_layernorm", ""),
    "step": ("model.layers.{}.", "eh_proj", ("enorm", "hnorm"), "shared_head.norm", "transformer."),
    "deepseek": ("model.layers.{}.", "eh_proj", ("enorm", "hnorm"), "shared_head.norm", ""),
}


def mtp(
    directory: Path,
    family: str,
    *,
    num_heads: int = 1,
    draft_vocab: int | None = None,
    seed: int = 0,
    **fields: Option,
) -> Path:
    """MTP heads under the names of "mimo", "mimo_v2", "step" or "deepseek"."""
    torch.manual_seed(seed)
    prefix, join, norms, final, block = MTP_NAMES[family]
    tensors: dict[str, Tensor] = {}
    for index in range(num_heads):
        own = {f"{join}.weight": matrix(HIDDEN, 2 * HIDDEN), f"{final}.weight": norm()}
        own |= {f"{name}.weight": norm() for name in norms}
        own |= layer(block, qkv_bias=family == "mimo")
        if family == "step":
            own = {n: t - 1 if "norm" in n else t for n, t in own.items()}
            own["shared_head.output.weight"] = 3 * matrix(draft_vocab or VOCAB, HIDDEN)
        if family == "deepseek":
            own["embed_tokens.weight"] = matrix(VOCAB, HIDDEN)
            own["shared_head.head.weight"] = 3 * matrix(draft_vocab or VOCAB, HIDDEN)
        if family == "mimo_v2":
            own["pre_mlp_layernorm.weight"] = own.pop("post_attention_layernorm.weight")
        number = index + (TARGET_LAYERS if family in ("step", "deepseek") else 0)
        tensors |= {prefix.format(number) + name: tensor for name, tensor in own.items()}
    if draft_vocab is not None:
        tensors |= draft_vocabulary(draft_vocab, VOCAB)
        del tensors["t2d"]
    config = LAYER_FIELDS | {
        "num_hidden_layers": TARGET_LAYERS,
        "num_nextn_predict_layers": num_heads,
        "draft_vocab_size": draft_vocab,
    }
    return write(directory, tensors, config | fields)
