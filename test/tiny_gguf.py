"""GGUF files of tiny models, written by the gguf library's own writer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tiny import MERGES, SPECIAL_TOKENS, tiny_tokenizer

MetadataValue = int | float | bool | str
_K_BLOCK = 256
# Offsets of the fp16 scales inside a K-quant block.
_SCALES_AT = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    type_name: str = "F32",
    *,
    extra: dict[str, MetadataValue] | None = None,
    without: tuple[str, ...] = (),
    rope_divisors: NDArray[np.float32] | None = None,
) -> PreTrainedModel:
    """Write `model`, and round its matrices to what the file holds, so that it is the oracle.

    Args:
        type_name: GGUF type of all matrices.
        extra: more metadata, or other values; keys without a dot belong to the architecture.
        without: metadata keys to leave out.
        rope_divisors: the tensor that Llama 3 files carry.
    """
    kind, config = Type[type_name], model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    metadata = _metadata(model, arch) | (extra or {})
    for key in metadata.keys() - set(without):
        _add(writer, key, metadata[key])
    _add_tokenizer(writer, int(config.vocab_size))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    tied = bool(config.tie_word_embeddings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if tied and name == "lm_head.weight":
                continue
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            part = name.split(".")[-2]
            permuted = heads.get(part, 0) if arch == "llama" else 0
            values = parameter.float().numpy()
            if parameter.dim() == 2:
                values = _stored(values, kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(values, kind)))
            out_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            raw_type = kind if parameter.dim() == 2 else Type.F32
            writer.add_tensor(out_name, _interleaved(values, permuted), raw_dtype=raw_type)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _metadata(model: PreTrainedModel, arch: str) -> dict[str, MetadataValue]:
    config = model.config
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: MetadataValue) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    vocab = tiny_tokenizer(vocab_size).get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(MERGES[: max(0, len(tokens) - 259)])


def _stored(values: NDArray[np.float32], kind: Type) -> NDArray[np.generic]:
    """`values` in a type; K-quants, which the library cannot write, get random codes."""
    if kind not in _SCALES_AT:
        stored: NDArray[np.generic] = gguf.quants.quantize(values, kind)
        return stored
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    assert columns % block_size == 0, columns
    generator = np.random.default_rng(rows * columns)
    blocks = generator.integers(0, 256, (rows, columns // block_size, type_size), dtype=np.uint8)
    for offset in _SCALES_AT[kind]:
        scales = generator.uniform(1e-5, 1e-4, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _interleaved(values: NDArray[np.generic], num_heads: int) -> NDArray[np.generic]:
    """Rows reordered as GGUF's Llama expects: halves of each head interleaved."""
    if num_heads == 0:
        return values
    half = values.shape[0] // num_heads // 2
    order = [
        head * 2 * half + side * half + index
        for head in range(num_heads)
        for index in range(half)
        for side in (0, 1)
    ]
    return np.ascontiguousarray(values[order])
