"""Numba twin of `noise.py`: scalar functions that inline into the row kernels, same bits.

Knows the arithmetic only. NOTE: no fastmath anywhere here: a contraction to FMA or a reassociation
would break bit-equality with torch and Triton.
"""

from __future__ import annotations

import numpy as np

from . import noise
from .jit import inline_kernel

_GOLDEN = np.uint64(noise.GOLDEN)
_MIX_A = np.uint64(noise.MIX_A)
_MIX_B = np.uint64(noise.MIX_B)
_POSITION_FACTOR = np.uint64(noise.POSITION_FACTOR)
_MIX32_A = np.uint32(noise.MIX32_A)
_MIX32_B = np.uint32(noise.MIX32_B)
_ID_FACTOR = np.uint32(noise.ID_FACTOR)
_MAX_HASH = np.uint32(noise.MAX_HASH)
_SCALE = np.float32(2.0**-24)

_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (np.float32(c) for c in noise.LOG_POLY)
_E0, _E1, _E2, _E3, _E4, _E5 = (np.float32(c) for c in noise.EXP_POLY)
_SQRT_HALF = np.float32(noise.SQRT_HALF)
_LN2_HIGH = np.float32(noise.LN2_HIGH)
_LN2_LOW = np.float32(noise.LN2_LOW)
_LOG2_E = np.float32(noise.LOG2_E)
_MIN_EXP = np.float32(noise.MIN_EXP)
_MASS_SCALE = np.float32(noise.MASS_SCALE)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)


@inline_kernel
def mix64(z):  # type: ignore[no-untyped-def]
    """uint64 -> uint64, a bijection with full avalanche (splitmix64)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))


@inline_kernel
def row_keys(seed, position, domain):  # type: ignore[no-untyped-def]
    """int64 seed and position, uint64 domain -> two uint32 keys."""
    z = mix64(np.uint64(seed) + (_GOLDEN + domain))
    z = mix64(z ^ (np.uint64(position) * _POSITION_FACTOR))
    return np.uint32(z & np.uint64(0xFFFFFFFF)), np.uint32(z >> np.uint64(32))


@inline_kernel
def mix32(x):  # type: ignore[no-untyped-def]
    """uint32 -> uint32, a bijection with full avalanche."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * _MIX32_A)
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * _MIX32_B)
    return np.uint32(x ^ (x >> np.uint32(16)))


@inline_kernel
def hash24(low, high, token_id):  # type: ignore[no-untyped-def]
    """Row keys and uint32 id -> uint32 in 0 .. 2^24 - 2."""
    x = np.uint32(np.uint32(token_id) * _ID_FACTOR)
    x = mix32(np.uint32(x + low))
    x = mix32(np.uint32(x + high))
    x = np.uint32(x >> np.uint32(8))
    return min(x, _MAX_HASH)


@inline_kernel
def uniform(low, high, token_id):  # type: ignore[no-untyped-def]
    """fp32 in (0, 1), a multiple of 2^-24."""
    h = np.int32(hash24(low, high, token_id))
    return np.float32(np.int32(h + np.int32(1))) * _SCALE


@inline_kernel
def gumbel(low, high, token_id):  # type: ignore[no-untyped-def]
    """fp32 Gumbel noise of one token."""
    return -log_fixed(-log_fixed(uniform(low, high, token_id)))


@inline_kernel
def log_fixed(x):  # type: ignore[no-untyped-def]
    """Natural logarithm of a positive normal fp32 number."""
    bits = np.float32(x).view(np.int32)
    exponent = np.float32(np.int32((bits >> np.int32(23)) - np.int32(126)))
    mantissa = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)).view(np.float32)
    is_low = mantissa < _SQRT_HALF
    exponent = exponent - _ONE if is_low else exponent
    f = (mantissa + mantissa) - _ONE if is_low else mantissa - _ONE
    z = f * f
    y = _L0 * f + _L1
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
    y = y - z * _HALF
    return (f + y) + exponent * _LN2_HIGH


@inline_kernel
def exp_fixed(x):  # type: ignore[no-untyped-def]
    """exp of an fp32 number <= 0."""
    x = max(x, _MIN_EXP)
    n = np.int32(x * _LOG2_E - _HALF)
    n_float = np.float32(n)
    r = x - n_float * _LN2_HIGH
    r = r - n_float * _LN2_LOW
    y = _E0 * r + _E1
    y = y * r + _E2
    y = y * r + _E3
    y = y * r + _E4
    y = y * r + _E5
    y = y * (r * r)
    y = (y + r) + _ONE
    bits = np.float32(y).view(np.int32) + np.int32(n << np.int32(23))
    return np.int32(bits).view(np.float32)


@inline_kernel
def mass_fixed(x):  # type: ignore[no-untyped-def]
    """exp of an fp32 number <= 0 as an int64 multiple of 2^-40, rounded down."""
    return np.int64(exp_fixed(x) * _MASS_SCALE)
