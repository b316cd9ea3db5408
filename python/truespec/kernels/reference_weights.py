"""Widening: the exact fp32 values of a stored weight, whatever its type. Narrowing: fewer bits.

Knows GGUF's block types through the gguf library; knows nothing of layers.
"""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from .api import Weight

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_TYPES = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
NARROWED_AT_ONCE = 1024  # rows whose fp32 values are in memory together
MAX_SCALE = torch.finfo(torch.float16).max  # the scales of blocks are fp16


def widen(weight: Weight) -> Tensor:
    """[n, k] fp32 values of a weight, on the device of `weight.data`."""
    return widen_rows(weight.data, weight.type)


def widen_rows(data: Tensor, type_name: str) -> Tensor:
    """[n, k] fp32 values of rows that are stored as `type_name`.

    Args:
        data: [n, k] of a float type, or [n, bytes per row] uint8 blocks.

    Raises:
        ValueError: the type is not one that `Weight` lists.
    """
    if type_name in FLOAT_TYPES:
        return data.to(torch.float32)
    if type_name not in BLOCK_TYPES:
        known = ", ".join(sorted([*FLOAT_TYPES, *BLOCK_TYPES]))
        raise ValueError(f"weight type is {type_name!r}, expected one of {known}")
    blocks = data.cpu().contiguous().numpy()
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    return torch.from_numpy(values).to(data.device)


def narrow(weight: Weight, type_name: str | None) -> Weight:
    """The weight in a type of fewer bits, by the gguf library's rounding.

    Args:
        type_name: a block type that the library writes ("Q8_0", "Q4_1"); `None` keeps the weight.

    Returns `weight` itself where it has no more bits than that, where k is no multiple of a block,
    and where a value is not a number or too large for a block's scale.
    """
    if type_name is None or _bits(weight.type) <= _bits(type_name):
        return weight
    if weight.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]:
        return weight
    parts = []
    for rows in weight.data.split(NARROWED_AT_ONCE):
        values = widen_rows(rows.cpu(), weight.type)
        if not bool(values.abs().max() <= MAX_SCALE):  # false for NaN as well
            return weight
        blocks = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[type_name])
        parts.append(torch.from_numpy(blocks))
    return Weight(torch.cat(parts).to(weight.data.device), type_name, weight.shape)


def _bits(type_name: str) -> float:
    """Of one value, its part of a block's scales included."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return 8 * num_bytes / num_values
