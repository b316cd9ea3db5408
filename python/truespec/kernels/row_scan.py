"""Numba building blocks that read one row of logits: keys, block maxima, sums, best tokens.

Knows an fp32 row and nothing of requests. Every sum has one fixed order, so a row's result is the
same bits in any batch. Keys: int32 numbers in the order of the floats, with -0.0 equal to 0.0.
"""

from __future__ import annotations

import math

import numpy as np

from .jit import inline_kernel, kernel
from .noise import MIN_EXP
from .noise_numba import exp_fixed

BLOCK = 128  # columns per block maximum
_FP32_BLOCKS = 8  # blocks added in fp32 before they go into float64
MIN_KEY = np.int32(-(2**31))
NO_TIE = np.int64(-1)  # NOTE: a plain -1 would compile callees a second time
INF_KEY = np.int32(0x7F800000)
NEG_INF_KEY = np.int32(-0x7F800001)
_ZERO = np.float32(0.0)
_MIN_EXP = np.float32(MIN_EXP)
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@inline_kernel
def key_of(x):  # type: ignore[no-untyped-def]
    """fp32 -> int32 with the same order. NaN lies outside [NEG_INF_KEY, INF_KEY]."""
    bits = np.float32(x + _ZERO).view(np.int32)
    return np.int32(bits ^ ((bits >> _SIGN) & _MAGNITUDE))


@inline_kernel
def value_of(key):  # type: ignore[no-untyped-def]
    """The fp32 number of a key."""
    return np.int32(key ^ ((key >> _SIGN) & _MAGNITUDE)).view(np.float32)


@kernel
def num_blocks(size):  # type: ignore[no-untyped-def]
    """Blocks of a row of `size` columns."""
    return (size + BLOCK - 1) // BLOCK


@kernel
def block_maxima(row, block_max):  # type: ignore[no-untyped-def]
    """Fill `block_max` [num_blocks] int32 with the largest key of each block.

    Returns the row's largest key, or MIN_KEY when no token can be chosen: a NaN or +inf anywhere,
    or nothing but -inf.
    """
    size = row.shape[0]
    top = MIN_KEY
    low = INF_KEY
    for b in range(num_blocks(size)):
        block = row[b * BLOCK : min(size, (b + 1) * BLOCK)]
        block_top = MIN_KEY
        for j in range(block.shape[0]):
            key = key_of(block[j])
            block_top = max(block_top, key)
            low = min(low, key)
        block_max[b] = block_top
        top = max(top, block_top)
    if top >= INF_KEY or low < NEG_INF_KEY or top <= NEG_INF_KEY:
        return MIN_KEY
    return top


@kernel
def first_of_key(row, block_max, key):  # type: ignore[no-untyped-def]
    """Lowest column whose key is `key`; it must be there."""
    size = row.shape[0]
    for b in range(num_blocks(size)):
        if block_max[b] >= key:
            for j in range(b * BLOCK, min(size, (b + 1) * BLOCK)):
                if key_of(row[j]) == key:
                    return j
    return -1


@kernel
def count_above(row, block_max, key):  # type: ignore[no-untyped-def]
    """Columns with a key strictly above `key`."""
    size = row.shape[0]
    total = np.int64(0)
    for b in range(num_blocks(size)):
        if block_max[b] > key:
            block = row[b * BLOCK : min(size, (b + 1) * BLOCK)]
            above = np.int32(0)
            for j in range(block.shape[0]):
                above += np.int32(key_of(block[j]) > key)
            total += above
    return total


@kernel
def exp_sums(row, block_max, top, temperature, line, tie):  # type: ignore[no-untyped-def]
    """Sum of exp(s) and of exp(s) * s over the kept columns, s = (x - top) / temperature <= 0.

    Kept is key > line, or key == line and column <= tie. A line of None keeps all, a temperature of
    None is 1; both compile to code without them. One fixed order: lane j adds column j of each
    block in fp32, a few blocks at a time; these go into float64 lanes, which are added in the end.
    """
    size = row.shape[0]
    blocks = num_blocks(size)
    sums = np.zeros(BLOCK, np.float32)
    weighted = np.zeros(BLOCK, np.float32)
    wide_sums = np.zeros(BLOCK)
    wide_weighted = np.zeros(BLOCK)
    for b in range(blocks):
        start = b * BLOCK
        block = row[start : min(size, start + BLOCK)]
        if line is None or block_max[b] >= line:
            for j in range(block.shape[0]):
                e, s = _term(block[j], np.int32(start + j), top, temperature, line, tie)
                sums[j] += e
                weighted[j] += e * s
        if b % _FP32_BLOCKS == _FP32_BLOCKS - 1 or b == blocks - 1:
            for j in range(BLOCK):
                wide_sums[j] += sums[j]
                wide_weighted[j] += weighted[j]
                sums[j] = _ZERO
                weighted[j] = _ZERO
    total = 0.0
    total_weighted = 0.0
    for j in range(BLOCK):
        total += wide_sums[j]
        total_weighted += wide_weighted[j]
    return total, total_weighted


@inline_kernel
def _term(x, column, top, temperature, line, tie):  # type: ignore[no-untyped-def]
    # NOTE: the clamp keeps 0 * -inf out; exp(-87) vanishes beside the 1 of the largest token.
    s = x - top
    if temperature is not None:
        s = s / temperature
    s = max(s, _MIN_EXP)
    e = exp_fixed(s)
    if line is not None:
        key = key_of(x)
        e = e if (key > line) | ((key == line) & (column <= tie)) else _ZERO
    return e, s


@kernel
def kth_largest(keys, n, k):  # type: ignore[no-untyped-def]
    """The k-th largest of the first n int32 keys, 1 <= k <= n, by bisection on the value."""
    low = np.int64(MIN_KEY)  # at least k keys reach low; fewer reach high
    high = np.int64(INF_KEY) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count = 0
        for i in range(n):
            count += keys[i] >= middle
        if count >= k:
            low = middle
        else:
            high = middle
    return np.int32(low)


@kernel
def best_codes(row, block_max, k, codes):  # type: ignore[no-untyped-def]
    """The k best finite columns in the order (value descending, column ascending).

    Fills `codes` [>= 2 k + BLOCK] int64 with sortable codes, best first; `code_column` and
    `code_key` take them apart. Returns how many were found.
    """
    if k == 0:
        return 0
    size = row.shape[0]
    blocks = num_blocks(size)
    line = NEG_INF_KEY + np.int32(1)
    if k <= blocks:
        line = max(line, kth_largest(block_max, blocks, k))
    count = np.int64(0)
    for b in range(blocks):
        if block_max[b] < line:
            continue
        for j in range(b * BLOCK, min(size, (b + 1) * BLOCK)):
            key = key_of(row[j])
            if key >= line:
                codes[count] = _code(key, j)
                count += 1
        if count >= 2 * k:
            _sort(codes, count)
            count = k
            line = max(line, code_key(codes[k - 1]))
    _sort(codes, count)
    return min(count, k)


@kernel
def _sort(codes, n):  # type: ignore[no-untyped-def]
    """Shell sort of the first n, ascending: few elements, and quick to compile."""
    gap = n // 2
    while gap > 0:
        for i in range(gap, n):
            code = codes[i]
            j = i
            while j >= gap and codes[j - gap] > code:
                codes[j] = codes[j - gap]
                j -= gap
            codes[j] = code
        gap //= 2


@inline_kernel
def _code(key, column):  # type: ignore[no-untyped-def]
    # Ascending codes are descending keys, then ascending columns.
    return (np.int64(~key) << np.int64(32)) | np.int64(column)


@inline_kernel
def code_key(code):  # type: ignore[no-untyped-def]
    """Key of a code of `best_codes`."""
    return np.int32(~np.int32(code >> np.int64(32)))


@inline_kernel
def code_column(code):  # type: ignore[no-untyped-def]
    """Column of a code of `best_codes`."""
    return code & np.int64(0xFFFFFFFF)


@kernel
def log_sum(total):  # type: ignore[no-untyped-def]
    """Natural logarithm in float64."""
    return math.log(total)
