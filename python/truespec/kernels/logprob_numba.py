"""Logprobs of one emitted token in numba: two reads of its row, whatever is asked of it.

Knows flat rows and packed questions. The first read takes the maxima of blocks, the second the
log-sum-exp; best tokens and ranks look only into blocks whose maximum can matter.
"""

from __future__ import annotations

import numpy as np

from .jit import kernel
from .row_scan import (
    BLOCK,
    MIN_KEY,
    NO_TIE,
    best_codes,
    block_maxima,
    code_column,
    code_key,
    count_above,
    exp_sums,
    key_of,
    log_sum,
    num_blocks,
    value_of,
)

_ONE = np.float32(1.0)
_NAN = np.float32(np.nan)
_NEG_INF = np.float32(-np.inf)
_MIN_TEMPERATURE = np.float32(2.0**-126)
_RAW = 0
_PROCESSED = 2


@kernel
def logprob_slots(begin, end, raw, edited, slots, vocab, ask, filters, out):  # type: ignore[no-untyped-def]
    """Answer slots begin .. end - 1.

    Args:
        raw, edited: (flat fp32, distance between rows).
        slots: (token [S], row in `raw`, row in `edited`, row in `filters`, emitted tokens [bs]);
            slot s is token s % D of request s // D, D = S / bs.
        ask: (k [bs], asked ids, offsets [bs + 1], mode codes [bs * M]).
        filters: (temperature, keep threshold, tie id) by row.
        out: (buffer as int32, as fp32, ends of its parts, K, A), see `LogprobOutput`; every place
            of these slots is written.
    """
    num_requests = slots[4].shape[0]
    width = slots[0].shape[0] // num_requests
    modes = ask[3].reshape(num_requests, ask[3].shape[0] // num_requests)
    ask = (ask[0], ask[1], ask[2], modes)
    parts = _parts(out, modes.shape[1], slots[0].shape[0])
    blocks = num_blocks(vocab)
    k_max = out[3]
    block_max = np.empty(blocks, np.int32)
    codes = np.empty(2 * k_max + BLOCK, np.int64)
    for s in range(begin, end):
        _clear(s, parts)
        token = slots[0][s]
        request = s // width
        highest_mode = _highest(ask[3][request])
        if s % width >= slots[4][request] or highest_mode < 0:
            continue
        row = _row(raw, slots[1][s], vocab)
        top_key = block_maxima(row, block_max)
        if top_key != MIN_KEY:
            _answer_raw(row, block_max, value_of(top_key), s, token, request, ask, parts, codes)
        if highest_mode > _RAW:
            row = _row(edited, slots[2][s], vocab)
            top_key = block_maxima(row, block_max)
            if top_key != MIN_KEY:
                r = slots[3][s]
                limits = (filters[0][r], filters[1][r], filters[2][r])
                _answer_edited(
                    row, block_max, value_of(top_key), limits, s, token, request, ask, parts, codes
                )


@kernel
def _parts(out, num_modes, num_slots):  # type: ignore[no-untyped-def]
    """Chosen [M, S], top ids [M, S, K], top values, asked [M, S, A], rank [S], entropy [S]."""
    ints, floats, ends, k, a = out
    return (
        floats[: ends[0]].reshape(num_modes, num_slots),
        ints[ends[0] : ends[1]].reshape(num_modes, num_slots, k),
        floats[ends[1] : ends[2]].reshape(num_modes, num_slots, k),
        floats[ends[2] : ends[3]].reshape(num_modes, num_slots, a),
        ints[ends[3] : ends[4]],
        floats[ends[4] :],
    )


@kernel
def _clear(s, out):  # type: ignore[no-untyped-def]
    """Fillers: nan, id -1, rank 0."""
    out[4][s] = 0
    out[5][s] = _NAN
    for m in range(out[0].shape[0]):
        out[0][m, s] = _NAN
        for j in range(out[1].shape[2]):
            out[1][m, s, j] = -1
            out[2][m, s, j] = _NAN
        for j in range(out[3].shape[2]):
            out[3][m, s, j] = _NAN


@kernel
def _highest(modes):  # type: ignore[no-untyped-def]
    highest = -1
    for m in range(modes.shape[0]):
        highest = max(highest, modes[m])
    return highest


@kernel
def _row(rows, index, vocab):  # type: ignore[no-untyped-def]
    flat, stride = rows
    start = np.int64(index) * np.int64(stride)
    return flat[start : start + vocab]


@kernel
def _answer_raw(row, block_max, top, s, token, request, ask, out, codes):  # type: ignore[no-untyped-def]
    total, weighted = exp_sums(row, block_max, top, None, None, None)
    log_total = log_sum(total)
    out[4][s] = 1 + count_above(row, block_max, key_of(row[token]))
    out[5][s] = log_total - weighted / total
    modes = ask[3][request]
    for m in range(modes.shape[0]):
        if modes[m] == _RAW:
            found = best_codes(row, block_max, np.int64(ask[0][request]), codes)
            scale = (top, _ONE, log_total, _NEG_INF, NO_TIE)
            _write(row, scale, m, s, token, request, ask, out, codes, found)


@kernel
def _answer_edited(row, block_max, top, limits, s, token, request, ask, out, codes):  # type: ignore[no-untyped-def]
    t = limits[0] if limits[0] >= _MIN_TEMPERATURE else _ONE
    found = best_codes(row, block_max, np.int64(ask[0][request]), codes)
    modes = ask[3][request]
    for m in range(modes.shape[0]):
        if modes[m] <= _RAW:
            continue
        if modes[m] == _PROCESSED and limits[1] > _NEG_INF:
            last_kept = (limits[1], limits[2])
            total, _ = exp_sums(row, block_max, top, t, key_of(limits[1]), np.int32(limits[2]))
        else:
            last_kept = (_NEG_INF, NO_TIE)
            total, _ = exp_sums(row, block_max, top, t, None, None)
        scale = (top, t, log_sum(total), last_kept[0], last_kept[1])
        _write(row, scale, m, s, token, request, ask, out, codes, found)


@kernel
def _write(row, scale, m, s, token, request, ask, out, codes, found):  # type: ignore[no-untyped-def]
    """Chosen, best and asked tokens of one mode; the kept best are a prefix of the best."""
    out[0][m, s] = _logprob(row[token], token, scale)
    for j in range(found):
        column = code_column(codes[j])
        value = _logprob(value_of(code_key(codes[j])), column, scale)
        if np.isnan(value):
            break
        out[1][m, s, j] = column
        out[2][m, s, j] = value
    first = ask[2][request]
    for j in range(ask[2][request + 1] - first):
        column = ask[1][first + j]
        if 0 <= column < row.shape[0]:
            out[3][m, s, j] = _logprob(row[column], column, scale)


@kernel
def _logprob(x, column, scale):  # type: ignore[no-untyped-def]
    """Logprob of one token, nan where it is filtered or impossible."""
    top, t, log_total, threshold, tie = scale
    if x > threshold or (x == threshold and column <= tie):
        return np.float32(np.float64((x - top) / t) - log_total)
    return _NAN
