"""Widening: the exact fp32 values of a stored weight, whatever its type.

Knows GGUF's block types through the gguf library; knows nothing of layers.
"""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from .api import Weight

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_TYPES = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})


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
