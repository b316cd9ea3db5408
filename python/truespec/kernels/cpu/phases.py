"""What the phases of a step are made of: a thread's share of products, norms and copies.

Every function takes addresses and integers (see layout.py); strides are in floats. How work is
split never changes a result. Arithmetic is done by the kernels only.
"""

from __future__ import annotations

from .layout import (
    ADD_ROWS,
    BARRIER,
    BARRIER_COUNTER,
    BLOCK_BYTES,
    EPS_BITS,
    GIVE_WAY,
    HIDDEN,
    HIDDEN_STRIDE,
    L_BIAS,
    L_CODED,
    L_FUNCTION,
    L_GROUPS,
    L_PANEL_BYTES,
    L_PANELS,
    L_WORDS,
    LINEAR_OUT,
    NORMED,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_ROWS,
    QKV,
    QKV_STRIDE,
    RMS_NORM,
    SCRATCH,
    SCRATCH_BYTES,
    TO_FIXED,
    X,
)
from .native import Ints, call, compiled, int32s, int64s

BLOCK = 16
FLOAT = 4


@compiled
def barrier(r: Ints, num_threads: int, passed: int) -> int:
    """Wait for all threads; returns `passed` + 1."""
    if num_threads > 1:
        call(r[BARRIER], (r[BARRIER_COUNTER], passed + 1, num_threads, r[GIVE_WAY]))
    return passed + 1


@compiled
def share(count: int, thread: int, num_threads: int) -> tuple[int, int]:
    """[first, last) of a thread's part of `count` things."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


@compiled
def linear(
    r: Ints,
    thread: int,
    weight: int,
    x: int,
    fixed: int,
    ldx: int,
    y: int,
    ldy: int,
    first: int,
    last: int,
) -> None:
    """Panels [first, last) of y = x W^T for all rows, given as floats and in fixed point."""
    w = int64s(weight)
    if w[L_CODED] != 0:
        x = fixed
    scratch = r[SCRATCH] + thread * r[SCRATCH_BYTES]
    words, panel_bytes, groups = w[L_WORDS], w[L_PANEL_BYTES], w[L_GROUPS]
    ldx, ldy, rows = ldx * FLOAT, ldy * FLOAT, r[NUM_ROWS]
    args = (x, ldx, rows, words, first, last, panel_bytes, groups, y, ldy, scratch)
    call(w[L_FUNCTION], args)


@compiled
def split_linear(
    r: Ints, thread: int, num_threads: int, weight: int, x: int, fixed: int, ldx: int, column: int
) -> None:
    """A thread's part of one of q, k, v, which start at `column` of the qkv buffer."""
    first, last = share(int64s(weight)[L_PANELS], thread, num_threads)
    out, stride = r[QKV] + column * FLOAT, r[QKV_STRIDE]
    linear(r, thread, weight, x, fixed, ldx, out, stride, first, last)


@compiled
def add_linear(
    r: Ints, thread: int, num_threads: int, weight: int, x: int, fixed: int, ldx: int
) -> None:
    """A thread's columns of X += x W^T + bias."""
    w = int64s(weight)
    first, last = share(w[L_PANELS], thread, num_threads)
    stride = r[HIDDEN_STRIDE]
    linear(r, thread, weight, x, fixed, ldx, r[LINEAR_OUT], stride, first, last)
    bias = w[L_BIAS]
    if bias != 0:
        bias += 32 * first * FLOAT
    if first < last:
        for row in range(r[NUM_ROWS]):
            at = (row * stride + 32 * first) * FLOAT
            call(r[ADD_ROWS], (r[X] + at, r[LINEAR_OUT] + at, bias, 32 * (last - first)))


@compiled
def norm_rows(r: Ints, thread: int, num_threads: int, x: int, weight: int) -> None:
    """NORMED = norm(x) for a thread's rows; x has the stride of NORMED."""
    first, last = share(r[NUM_ROWS], thread, num_threads)
    hidden, stride = r[HIDDEN], r[HIDDEN_STRIDE]
    for row in range(first, last):
        at = row * stride * FLOAT
        call(r[RMS_NORM], (x + at, weight, r[NORMED] + at, hidden, stride, r[EPS_BITS]))


@compiled
def fix_rows(r: Ints, thread: int, num_threads: int, x: int, fixed: int, ldx: int) -> None:
    """A thread's rows in fixed point too, for coded weights."""
    first, last = share(r[NUM_ROWS], thread, num_threads)
    for row in range(first, last):
        at = row * ldx * FLOAT
        call(r[TO_FIXED], (x + at, fixed + at, ldx // 32))


@compiled
def pool_block(r: Ints, index: int, slot: int, head: int) -> int:
    """Offset of the block of one head that holds `slot`, in bytes."""
    return ((index * r[NUM_BLOCKS] + slot // BLOCK) * r[NUM_KV_HEADS] + head) * r[BLOCK_BYTES]


@compiled
def copy_rows(r: Ints, thread: int, num_threads: int, x: int, ldx: int, y: int, ldy: int) -> None:
    """Copy `hidden` floats of a thread's rows; strides in floats."""
    first, last = share(r[NUM_ROWS], thread, num_threads)
    for row in range(first, last):
        source, target = int32s(x + row * ldx * FLOAT), int32s(y + row * ldy * FLOAT)
        for i in range(r[HIDDEN]):
            target[i] = source[i]
