"""Triton twin of `kernels/noise.py`: the same bits on a GPU.

Knows the arithmetic only. NOTE: launch every kernel that calls these functions with
`enable_fp_fusion=False`; a multiply-add contracted to an FMA rounds once less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import noise

_BLOCK = 1024
_GOLDEN = tl.constexpr(noise.GOLDEN)
_MIX_A = tl.constexpr(noise.MIX_A)
_MIX_B = tl.constexpr(noise.MIX_B)
_POSITION_FACTOR = tl.constexpr(noise.POSITION_FACTOR)
_MIX32_A = tl.constexpr(noise.MIX32_A)
_MIX32_B = tl.constexpr(noise.MIX32_B)
_ID_FACTOR = tl.constexpr(noise.ID_FACTOR)
_MAX_HASH = tl.constexpr(noise.MAX_HASH)
_SCALE = tl.constexpr(2.0**-24)
_SQRT_HALF = tl.constexpr(noise.SQRT_HALF)
_LN2_HIGH = tl.constexpr(noise.LN2_HIGH)
_LN2_LOW = tl.constexpr(noise.LN2_LOW)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in noise.LOG_POLY)


@triton.jit
def row_keys(seed, position, domain):  # type: ignore[no-untyped-def]
    """int64 seed and position, uint64 domain -> two uint32 keys."""
    z = _mix64(seed.to(tl.uint64, bitcast=True) + (domain + _GOLDEN))
    z = _mix64(z ^ (position.to(tl.uint64, bitcast=True) * _POSITION_FACTOR))
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def gumbel(low, high, token_ids):  # type: ignore[no-untyped-def]
    """Row keys and integer ids -> fp32 Gumbel noise."""
    x = token_ids.to(tl.uint32) * _ID_FACTOR
    x = _mix32(x + low)
    x = _mix32(x + high)
    h = tl.minimum((x >> 8).to(tl.int32), _MAX_HASH)
    u = (h + 1).to(tl.float32) * _SCALE
    return -log_fixed(-log_fixed(u))


@triton.jit
def log_fixed(x):  # type: ignore[no-untyped-def]
    """Natural logarithm of positive normal fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    is_low = mantissa < _SQRT_HALF
    exponent = tl.where(is_low, exponent - 1.0, exponent)
    f = tl.where(is_low, (mantissa + mantissa) - 1.0, mantissa - 1.0)
    z = f * f
    y = f * _L0 + _L1
    y = y * f + _L2
    y = y * f + _L3
    y = y * f + _L4
    y = y * f + _L5
    y = y * f + _L6
    y = y * f + _L7
    y = y * f + _L8
    y = y * f
    y = y * z
    y = y + exponent * _LN2_LOW
    y = y - z * 0.5
    return (f + y) + exponent * _LN2_HIGH


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * _MIX32_A
    x = x ^ (x >> 15)
    x = x * _MIX32_B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]  # BLOCK alone has a type
def _gumbel_kernel(seeds, positions, token_ids, out, size, domain, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    # NOTE: a large domain must not become a 32-bit number on the way.
    low, high = row_keys(
        tl.load(seeds + row), tl.load(positions + row), tl.load(domain).to(tl.uint64, bitcast=True)
    )
    ids = tl.load(token_ids + columns, mask=is_inside, other=0)
    tl.store(out + row * size + columns, gumbel(low, high, ids), mask=is_inside)


def gumbel_rows(seed: Tensor, position: Tensor, token_ids: Tensor, domain: int = 0) -> Tensor:
    """`noise.gumbel` on the GPU: seed, position [n] int64, token_ids [c] int64 -> [n, c] fp32."""
    num_rows, size = seed.shape[0], token_ids.shape[0]
    out = torch.empty((num_rows, size), dtype=torch.float32, device=seed.device)
    if out.numel() == 0:
        return out
    domain_word = torch.tensor([domain], dtype=torch.int64, device=seed.device)
    grid = (num_rows, triton.cdiv(size, _BLOCK))
    _gumbel_kernel[grid](
        seed, position, token_ids, out, size, domain_word, BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out
