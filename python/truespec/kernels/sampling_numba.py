"""The sampler's row kernel in numba: filters as exact prefix selection, noise for the contenders.

Knows one row at a time; the torch twin in `sampling.py` gives the same tokens. Nothing is sorted
but a few contenders: a filter finds its last kept token by radix selection over integer masses.
"""

from __future__ import annotations

import math

import numpy as np

from .jit import kernel
from .noise_numba import exp_fixed, gumbel, hash24, mass_fixed, row_keys
from .row_scan import (
    BLOCK,
    MIN_KEY,
    NEG_INF_KEY,
    NO_TIE,
    block_maxima,
    first_of_key,
    key_of,
    kth_largest,
    num_blocks,
    value_of,
)

MIN_TEMPERATURE = np.float32(2.0**-126)
_MAX_NOISE = np.float32(16.64)
_MARGIN = np.float32(1e-3)
_ONE = np.float32(1.0)
_NUM_BUCKETS = 2048
_RADIX = ((21, 2047), (10, 2047), (0, 1023))  # (shift, bucket mask), most significant first


@kernel
def sample_rows(begin, end, flat, stride, origin, vocab, all_ids, params, out):  # type: ignore[no-untyped-def]
    """Rows begin .. end - 1; row i is at (i - origin) * stride of `flat`.

    `all_ids` [vocab] int32 counts up from 0. `params`: temperature, top-k, top-p, log of min-p,
    seed, position. `out`: ids, failed, threshold, tie.
    """
    temperature, top_k, top_p, log_min_p, seed, position = params
    ids, failed, threshold, tie_id = out
    block_max = np.empty(num_blocks(vocab), np.int32)
    any_filter = False
    for i in range(begin, end):
        any_filter |= _has_filter(vocab, temperature[i], top_k[i], top_p[i], log_min_p[i])
    room = vocab if any_filter else 0
    columns = np.empty(room, np.int32)
    keys = np.empty(room, np.int32)
    masses = np.empty(room, np.int64)
    hist = np.empty(_NUM_BUCKETS, np.int64)
    for i in range(begin, end):
        at = np.int64(i - origin) * np.int64(stride)
        row = flat[at : at + vocab]
        top_key = block_maxima(row, block_max)
        threshold[i] = -np.inf
        tie_id[i] = -1
        failed[i] = top_key == MIN_KEY
        if failed[i]:
            ids[i] = -1
            continue
        first = first_of_key(row, block_max, top_key)
        t = temperature[i]
        if t < MIN_TEMPERATURE:
            ids[i] = first
            continue
        line = MIN_KEY
        tie = NO_TIE
        if _has_filter(vocab, t, top_k[i], top_p[i], log_min_p[i]):
            kept = (columns, keys, masses, hist)
            n = _filter(
                row,
                block_max,
                value_of(top_key),
                t,
                np.int64(top_k[i]),
                top_p[i],
                log_min_p[i],
                kept,
            )
            line, tie = _last_kept(columns, keys, n)
            threshold[i] = value_of(line)
            tie_id[i] = tie
        low, high = row_keys(seed[i], position[i], np.uint64(0))
        ids[i] = perturbed_argmax(row, all_ids, block_max, first, t, line, tie, low, high)


@kernel
def _has_filter(vocab, t, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    if t < MIN_TEMPERATURE:
        return False
    return (0 < top_k < vocab) or top_p < 1.0 or log_min_p > -np.inf


@kernel
def perturbed_argmax(row, token_ids, block_max, first, t, line, tie, low, high):  # type: ignore[no-untyped-def]
    """Column of the largest (x - top) / t + noise among the kept, ties to the lowest column.

    `token_ids` [V] int32: the id that names a column's noise. `first`: the first best column.
    """
    size = row.shape[0]
    top = row[first]
    best = first
    best_score = np.float32((top - top) / t + gumbel(low, high, np.uint32(token_ids[first])))
    best_key = key_of(best_score)
    scores = np.empty(BLOCK, np.int32)
    for b in range(num_blocks(size)):
        block_top = block_max[b]
        if block_top < line or (value_of(block_top) - top) / t + _MAX_NOISE < best_score:
            continue
        start = b * BLOCK
        stop = min(size, start + BLOCK)
        need = best_score - (value_of(block_top) - top) / t
        if _is_hopeless(token_ids[start:stop], need, low, high):
            continue
        part = (row[start:stop], token_ids[start:stop])
        block_best = _score_block(part, start, top, t, line, tie, low, high, scores)
        if block_best < best_key or (block_best == best_key and start > best):
            continue
        j = 0
        while scores[j] != block_best:
            j += 1
        if block_best > best_key or start + j < best:
            best = start + j
            best_key = block_best
            best_score = value_of(block_best)
    return best


@kernel
def _is_hopeless(token_ids, need, low, high):  # type: ignore[no-untyped-def]
    """True only if no noise of the block exceeds `need`: hashes are cheap, their logarithms not.

    Noise above n needs u > exp(-exp(-n)) >= 1 - exp(-n). The margins outweigh all fp32 rounding.
    """
    if need < _ONE:
        return False
    largest = np.uint32(0)
    for j in range(token_ids.shape[0]):
        largest = max(largest, hash24(low, high, np.uint32(token_ids[j])))
    rest = np.float64(exp_fixed(_MARGIN - need)) * 1.00001
    return np.float64(largest) + 1.0 <= 2.0**24 * (1.0 - rest)


@kernel
def _score_block(part, start, top, t, line, tie, low, high, scores):  # type: ignore[no-untyped-def]
    """Keys of the perturbed scores of one block (MIN_KEY: filtered); returns the largest."""
    block, token_ids = part
    first = np.int32(start)
    last_tie = np.int32(tie)
    best = MIN_KEY
    for j in range(block.shape[0]):
        x = block[j]
        column = np.int32(first + np.int32(j))
        score = key_of((x - top) / t + gumbel(low, high, np.uint32(token_ids[j])))
        key = key_of(x)
        is_kept = (key > line) | ((key == line) & (column <= last_tie))
        score = score if is_kept else MIN_KEY
        scores[j] = score
        best = max(best, score)
    return best


@kernel
def _filter(row, block_max, top, t, top_k, top_p, log_min_p, kept):  # type: ignore[no-untyped-def]
    """Top-k, top-p, min-p. Leaves the kept columns, ascending, and their keys in `kept`."""
    columns, keys, masses, hist = kept
    n = -1  # nothing gathered yet: the whole row
    if 0 < top_k < row.shape[0]:
        n = _gather(row, block_max, _top_k_line(block_max, top_k), columns, keys)
        if n > top_k:
            for i in range(n):
                masses[i] = 1
            n = _cut(columns, keys, masses, n, top_k, hist)
    if top_p < 1.0:
        if n < 0:
            n, total = _gather_mass(row, block_max, top, t, top_p, columns, keys, masses)
        else:
            total = _masses_of(keys, n, top, t, masses)
        n = _cut(columns, keys, masses, n, _target(top_p, total), hist)
    if log_min_p > -np.inf:
        if n < 0:
            n = _gather(row, block_max, _min_p_line(top, t, log_min_p), columns, keys)
        n = _cut_min_p(columns, keys, n, top, t, log_min_p)
    return n


@kernel
def _gather(row, block_max, line, columns, keys):  # type: ignore[no-untyped-def]
    """Columns with key >= line, ascending; returns their number."""
    size = row.shape[0]
    n = 0
    for b in range(num_blocks(size)):
        if block_max[b] < line:
            continue
        for j in range(b * BLOCK, min(size, (b + 1) * BLOCK)):
            key = key_of(row[j])
            if key >= line:
                columns[n] = j
                keys[n] = key
                n += 1
    return n


@kernel
def _top_k_line(block_max, k):  # type: ignore[no-untyped-def]
    """A key that at least k columns reach: the k-th largest block maximum."""
    line = NEG_INF_KEY + np.int32(1)
    if k > block_max.shape[0]:
        return line
    return max(line, kth_largest(block_max, block_max.shape[0], k))


@kernel
def _min_p_line(top, t, log_min_p):  # type: ignore[no-untyped-def]
    """A key surely below the last token min-p keeps; `_cut_min_p` decides."""
    slack = 1e-5 * (abs(top) - log_min_p * t) + 1e-30
    return max(key_of(np.float32(top + log_min_p * t - slack)), NEG_INF_KEY + np.int32(1))


@kernel
def _gather_mass(row, block_max, top, t, top_p, columns, keys, masses):  # type: ignore[no-untyped-def]
    """Gather a prefix of the order that holds mass top_p; returns (columns, mass of the row)."""
    total = np.int64(0)
    for j in range(row.shape[0]):
        total += mass_fixed((row[j] - top) / t)
    target = _target(top_p, total)
    for depth in (3.0, 8.0, np.inf):
        line = max(key_of(np.float32(top - depth * t)), NEG_INF_KEY + np.int32(1))
        n = _gather(row, block_max, line, columns, keys)
        if _masses_of(keys, n, top, t, masses) >= target:
            break
    return n, total


@kernel
def _masses_of(keys, n, top, t, masses):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(n):
        masses[i] = mass_fixed((value_of(keys[i]) - top) / t)
        total += masses[i]
    return total


@kernel
def _target(top_p, total):  # type: ignore[no-untyped-def]
    """Smallest integer mass that is at least top_p of `total`, between 1 and `total`."""
    return min(max(np.int64(math.ceil(top_p * total)), np.int64(1)), total)


@kernel
def _cut(columns, keys, masses, n, target, hist):  # type: ignore[no-untyped-def]
    """Keep the shortest prefix of (key descending, column ascending) with mass >= target."""
    line, need = _crossing(keys, masses, n, target, hist)
    kept = 0
    for i in range(n):
        if keys[i] < line or (keys[i] == line and need <= 0):
            continue
        if keys[i] == line:
            need -= masses[i]
        columns[kept] = columns[i]
        keys[kept] = keys[i]
        kept += 1
    return kept


@kernel
def _crossing(keys, masses, n, target, hist):  # type: ignore[no-untyped-def]
    """The key where the mass from the top reaches `target`, and the mass needed of its equals."""
    prefix = np.uint32(0)
    fixed = np.uint32(0)
    need = np.int64(target)
    for shift, bucket_mask in _RADIX:
        for i in range(_NUM_BUCKETS):
            hist[i] = 0
        for i in range(n):
            key = np.uint32(np.uint32(keys[i]) ^ np.uint32(0x80000000))
            if (key & fixed) == prefix:
                hist[(key >> np.uint32(shift)) & np.uint32(bucket_mask)] += masses[i]
        bucket = bucket_mask
        while bucket > 0 and hist[bucket] < need:
            need -= hist[bucket]
            bucket -= 1
        prefix = np.uint32(prefix | (np.uint32(bucket) << np.uint32(shift)))
        fixed = np.uint32(fixed | (np.uint32(bucket_mask) << np.uint32(shift)))
    return np.int32(np.uint32(prefix ^ np.uint32(0x80000000))), need


@kernel
def _cut_min_p(columns, keys, n, top, t, log_min_p):  # type: ignore[no-untyped-def]
    kept = 0
    for i in range(n):
        if np.float64((value_of(keys[i]) - top) / t) >= log_min_p:
            columns[kept] = columns[i]
            keys[kept] = keys[i]
            kept += 1
    return kept


@kernel
def _last_kept(columns, keys, n):  # type: ignore[no-untyped-def]
    line = keys[0]
    tie = columns[0]
    for i in range(1, n):
        if keys[i] <= line:  # columns ascend, so an equal key comes later
            line = keys[i]
            tie = columns[i]
    return line, tie
