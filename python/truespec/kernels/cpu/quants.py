"""GGUF blocks as integer codes with scales and minimums, without widening them.

value = code * scale + minimum, where code * scale is exact in fp32 for every type here (at most 24
significant bits), so that a fused multiply-add gives the very fp32 value GGUF's reference
dequantisation gives. Knows the block layouts of ggml; knows nothing of panels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [n, k] in groups along k.

    Attributes:
        codes: [n, groups, group] int8 (below 16 where the format has 4 bits).
        scales, minimums: [n, groups] fp16 or fp32.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor


def decode_q4_0(blocks: Tensor) -> Quantised:
    """[n, groups, 18] bytes: fp16 scale, 16 bytes; value = scale * (code - 8)."""
    scales = halves(blocks, 0)
    return Quantised(_nibbles(blocks[..., 2:]), scales, -8 * scales.float())


def decode_q5_0(blocks: Tensor) -> Quantised:
    """[n, groups, 22] bytes: fp16 scale, 32 high bits, 16 bytes; value = scale * (code - 16)."""
    codes = _nibbles(blocks[..., 6:]) + _high_bits(blocks[..., 2:6]) * 16 - 16
    scales = halves(blocks, 0)
    return Quantised(codes, scales, torch.zeros_like(scales))


def decode_q5_1(blocks: Tensor) -> Quantised:
    """[n, groups, 24] bytes: fp16 scale, fp16 minimum, 32 high bits, 16 bytes."""
    codes = _nibbles(blocks[..., 8:]) + _high_bits(blocks[..., 4:8]) * 16
    return Quantised(codes, halves(blocks, 0), halves(blocks, 2))


def decode_q8_0(blocks: Tensor) -> Quantised:
    """[n, groups, 34] bytes: fp16 scale, 32 int8 codes."""
    scales = halves(blocks, 0)
    return Quantised(blocks[..., 2:].view(torch.int8), scales, torch.zeros_like(scales))


def decode_q4_k(blocks: Tensor) -> Quantised:
    """[n, blocks, 144] bytes: 8 groups of 32 with 6-bit scales and minimums."""
    low = _split(blocks[..., 16:], 4, 1, 32)
    codes = torch.cat([low & 15, low >> 4], dim=-2).to(torch.int8)
    return _k_groups(blocks, codes.flatten(-3, -2))


def decode_q5_k(blocks: Tensor) -> Quantised:
    """[n, blocks, 176] bytes: as Q4_K with a fifth bit of every code in bytes 16 .. 47."""
    low = _split(blocks[..., 48:], 4, 1, 32)
    four = torch.cat([low & 15, low >> 4], dim=-2).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1
    return _k_groups(blocks, (four | (fifth << 4)).to(torch.int8))


def decode_q6_k(blocks: Tensor) -> Quantised:
    """[n, blocks, 210] bytes: 16 groups of 16 with int8 scales; value = scale * (code - 32)."""
    low = _split(blocks[..., :128], 2, 1, 64)
    four = _split(torch.cat([low & 15, low >> 4], dim=-2), 2, 32).flatten(-3, -2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = (four | (high << 4)).to(torch.int8) - 32
    scales = halves(blocks, 208).unsqueeze(-1).float() * blocks[..., 192:208].view(torch.int8)
    scales = scales.flatten(1)
    grouped = _split(codes.flatten(-3), 16, 16).flatten(1, 2)
    return Quantised(grouped, scales, torch.zeros_like(scales))


DECODERS = {
    "Q4_0": (18, decode_q4_0),
    "Q5_0": (22, decode_q5_0),
    "Q5_1": (24, decode_q5_1),
    "Q8_0": (34, decode_q8_0),
    "Q4_K": (144, decode_q4_k),
    "Q5_K": (176, decode_q5_k),
    "Q6_K": (210, decode_q6_k),
}


def halves(blocks: Tensor, offset: int) -> Tensor:
    """The fp16 at byte `offset` of every block."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., 16] bytes -> [..., 32] int8: the low halves, then the high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8)


def _high_bits(packed: Tensor) -> Tensor:
    """[..., 4] bytes -> [..., 32] int8 of 0 or 1, lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2).to(torch.int8)


def _k_groups(blocks: Tensor, codes: Tensor) -> Quantised:
    """Scales and minimums of Q4_K and Q5_K: fp16 d and dmin times 6-bit integers.

    Args:
        codes: [n, blocks, 8, 32].
    """
    packed = _split(blocks[..., 4:16], 3, 4)
    d, m, both = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scale_bits = torch.cat([d & 63, (both & 15) | ((d >> 2) & 48)], dim=-1)
    minimum_bits = torch.cat([m & 63, (both >> 4) | ((m >> 2) & 48)], dim=-1)
    scales = halves(blocks, 0).unsqueeze(-1).float() * scale_bits
    minimums = -(halves(blocks, 2).unsqueeze(-1).float() * minimum_bits)
    return Quantised(codes.flatten(1, 2), scales.flatten(1), minimums.flatten(1))
