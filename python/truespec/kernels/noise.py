"""The noise of sampling and the fixed arithmetic behind it, in torch.

Knows: how (seed, position, token id) becomes a Gumbel value, and log and exp as fixed polynomials
of IEEE fp32 operations, so that numba and Triton give the same bits. Knows no logits or requests.
The numba twin is `noise_numba.py`, the Triton twin `gpu/noise.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MAX_HASH = 2**24 - 2

# Purposes: streams under different domains are independent. Drafts share TARGET in coupled mode.
DOMAIN_TARGET = 0
DOMAIN_DRAFT = 0x3C6EF372FE94F82B
DOMAIN_ACCEPT = 0x510E527FADE682D1
DOMAIN_RESIDUAL = 0x1F83D9ABFB41BD6B

# splitmix64, as signed 64-bit numbers where torch and numba need them.
GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
POSITION_FACTOR = 0xD1342543DE82EF95
# A 32-bit finaliser with full avalanche.
MIX32_A = 0x7FEB352D
MIX32_B = 0x846CA68B
ID_FACTOR = 0x9E3779B1

# Cephes logf on [sqrt(1/2), sqrt(2)), highest power first.
LOG_POLY = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
SQRT_HALF = 0.707106781186547524
# ln(2) in two parts: the first has few bits, so that its product with an exponent is exact.
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4

# Cephes expf on [-ln(2)/2, ln(2)/2], highest power first.
EXP_POLY = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG2_E = 1.44269504088896341
MIN_EXP = -87.0  # exp of less would be a subnormal number

MASS_SCALE = 2.0**40  # integer masses: sums of them do not depend on the order


def gumbel(seed: Tensor, position: Tensor, token_ids: Tensor, domain: int = 0) -> Tensor:
    """Gumbel noise of every (row, token): -log(-log(u)), in [-2.82, 16.64].

    Args:
        seed: [n] int64, 64 bits in two's complement.
        position: [n] int64 absolute position of the token being chosen.
        token_ids: [n, c] or [c] int64 ids in the target's vocabulary.
        domain: one of the `DOMAIN_` constants.

    Returns:
        [n, c] fp32.
    """
    u = uniform(seed, position, token_ids, domain)
    return -log_fixed(-log_fixed(u))


def uniform(seed: Tensor, position: Tensor, token_ids: Tensor, domain: int = 0) -> Tensor:
    """Uniform numbers (h + 1) * 2^-24 in (0, 1); arguments and shape as in `gumbel`."""
    h = hash24(seed, position, token_ids, domain)
    return (h + 1).to(torch.float32) * (2.0**-24)


def hash24(seed: Tensor, position: Tensor, token_ids: Tensor, domain: int = 0) -> Tensor:
    """[n, c] int64 hashes in 0 .. 2^24 - 2; arguments as in `gumbel`."""
    low, high = _row_keys(seed, position, domain)
    x = token_ids.to(torch.int64) & MASK32
    x = (x * ID_FACTOR + low.unsqueeze(-1)) & MASK32
    x = _mix32(x)
    x = (x + high.unsqueeze(-1)) & MASK32
    x = _mix32(x)
    return (x >> 8).clamp_max(MAX_HASH)


def log_fixed(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal fp32 numbers, within 1 ulp or 1e-7 absolute."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).to(torch.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)  # in [1/2, 1)
    is_low = mantissa < SQRT_HALF
    exponent = torch.where(is_low, exponent - 1.0, exponent)
    f = torch.where(is_low, (mantissa + mantissa) - 1.0, mantissa - 1.0)
    z = f * f
    y = torch.full_like(f, LOG_POLY[0])
    for c in LOG_POLY[1:]:
        y = y * f
        y = y + c
    y = y * f
    y = y * z
    y = y + exponent * LN2_LOW
    y = y - z * 0.5
    return (f + y) + exponent * LN2_HIGH


def exp_fixed(x: Tensor) -> Tensor:
    """exp(x) for fp32 x <= 0, within 2 ulp; everything below `MIN_EXP` counts as `MIN_EXP`."""
    x = x.clamp_min(MIN_EXP)
    n = (x * LOG2_E - 0.5).to(torch.int32)  # rounds to nearest, since x <= 0 and casts truncate
    n_float = n.to(torch.float32)
    r = x - n_float * LN2_HIGH
    r = r - n_float * LN2_LOW
    y = torch.full_like(r, EXP_POLY[0])
    for c in EXP_POLY[1:]:
        y = y * r
        y = y + c
    y = y * (r * r)
    y = (y + r) + 1.0
    return (y.view(torch.int32) + (n << 23)).view(torch.float32)


def mass_fixed(x: Tensor) -> Tensor:
    """exp(x) as int64 multiples of 2^-40, rounded down. fp32 x <= 0."""
    return (exp_fixed(x) * MASS_SCALE).to(torch.int64)


def signed64(value: int) -> int:
    """The two's complement of the low 64 bits of `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _row_keys(seed: Tensor, position: Tensor, domain: int) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys per row, as int64."""
    z = _mix64(seed + signed64(GOLDEN + domain))
    z = _mix64(z ^ (position.to(torch.int64) * signed64(POSITION_FACTOR)))
    return z & MASK32, (z >> 32) & MASK32


def _mix64(z: Tensor) -> Tensor:
    # NOTE: int64 shifts are arithmetic; the masks make them logical.
    z = (z ^ ((z >> 30) & (2**34 - 1))) * signed64(MIX_A)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * signed64(MIX_B)
    return z ^ ((z >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    """Values below 2^32 in int64; products wrap, their low 32 bits are right."""
    x = x ^ (x >> 16)
    x = (x * MIX32_A) & MASK32
    x = x ^ (x >> 15)
    x = (x * MIX32_B) & MASK32
    return x ^ (x >> 16)
