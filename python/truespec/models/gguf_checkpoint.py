"""Reading GGUF files: tensors under Hugging Face names, blocks kept as they are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from truespec.kernels.reference_weights import BLOCK_TYPES, FLOAT_TYPES
from truespec.utils.gguf_file import GGUFFile

from .checkpoint import Checkpoint, StoredTensor
from .config import ModelConfig
from .fields import CheckpointError
from .gguf_config import ROPE_DIVISORS, read_gguf_config

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)$")


class GGUFCheckpoint(Checkpoint):
    """One GGUF file."""

    def __init__(self, path: Path, dtype: str = "auto") -> None:
        """Open `path`.

        Raises:
            CheckpointError: it is no GGUF file, or describes a model that is not built.
        """
        super().__init__(path.name, dtype)
        self._file = open_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._file.tensors}
        self.config: ModelConfig = read_gguf_config(self._file, path.name)

    def has(self, name: str) -> bool:
        """See `Checkpoint`."""
        return gguf_name(name) in self._tensors

    def drop_pages(self) -> None:
        """See `Checkpoint`."""
        self._file.drop_pages()

    def _own_name(self, name: str) -> str:
        return gguf_name(name)

    def _names(self) -> set[str]:
        used = {gguf_name(name) for name in self._used}
        return set(self._tensors) - used - {ROPE_DIVISORS}

    def _load(self, name: str) -> StoredTensor:
        tensor = self._tensors[gguf_name(name)]
        kind = tensor.tensor_type.name
        if kind not in BLOCK_TYPES and kind not in FLOAT_TYPES:
            known = ", ".join(sorted([*FLOAT_TYPES, *BLOCK_TYPES]))
            raise CheckpointError(
                f"{self._source}: tensor {tensor.name} has type {kind}, expected one of {known}"
            )
        num_heads = self._permuted_heads(name)
        rows = _unpermuted(tensor.data, num_heads) if num_heads else tensor.data
        data = torch.from_numpy(rows)
        if kind == "BF16":
            data = data.view(torch.bfloat16)
        return StoredTensor(data, kind, tuple(reversed(tensor.shape.tolist())))

    def _permuted_heads(self, name: str) -> int:
        """Heads whose rows GGUF reorders for interleaved rotation; 0 where it does not."""
        if self.config.family != "llama":
            return 0
        if ".self_attn.q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".self_attn.k_proj." in name else 0


def open_gguf(path: Path) -> GGUFFile:
    """The file, or a `CheckpointError` that says what is wrong with it."""
    try:
        return GGUFFile(path)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from None


def gguf_name(name: str) -> str:
    """GGUF's spelling of a Hugging Face tensor name; other names stay as they are."""
    layer = _LAYER.match(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _unpermuted(rows: NDArray[np.generic], num_heads: int) -> NDArray[np.generic]:
    """Rows in the order where element i turns with element i + head_dim / 2.

    Blocks run along a row, so rows of blocks are reordered like rows of numbers.
    """
    half = rows.shape[0] // num_heads // 2
    split = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)
