"""Numba kernels of the drafters' choice: one row at a time, the sampler's own arithmetic."""

from __future__ import annotations

import numpy as np

from .jit import kernel
from .noise_numba import gumbel, row_keys
from .row_scan import (
    BLOCK,
    MIN_KEY,
    NO_TIE,
    best_codes,
    block_maxima,
    code_column,
    code_key,
    exp_sums,
    first_of_key,
    log_sum,
    num_blocks,
    value_of,
)
from .sampling_numba import MIN_TEMPERATURE, perturbed_argmax

_ONE = np.float32(1.0)


@kernel
def draft_rows(  # type: ignore[no-untyped-def]
    flat, stride, vocab, token_ids, temperature, seed, position, domain, columns, logprobs
):
    """The best column of each row and its logprob; see `sampling_draft.choose_drafts`."""
    block_max = np.empty(num_blocks(vocab), np.int32)
    for i in range(columns.shape[0]):
        row = flat[i * stride : i * stride + vocab]
        columns[i], logprobs[i] = draft_row(
            row, block_max, token_ids, temperature[i], seed[i], position[i], domain
        )


@kernel
def draft_row(row, block_max, token_ids, t, seed, position, domain):  # type: ignore[no-untyped-def]
    """(best column, its logprob) of a row; `block_max` is scratch."""
    top_key = block_maxima(row, block_max)
    if top_key == MIN_KEY:
        return 0, np.float32(-np.inf)
    best = first_of_key(row, block_max, top_key)
    if t < MIN_TEMPERATURE:
        t = _ONE
    else:
        low, high = row_keys(seed, position, np.uint64(domain))
        best = perturbed_argmax(row, token_ids, block_max, best, t, MIN_KEY, NO_TIE, low, high)
    top = value_of(top_key)
    total, _ = exp_sums(row, block_max, top, t, None, None)
    return best, (row[best] - top) / t - log_sum(total)


@kernel
def top_k_draft_rows(flat, stride, vocab, token_ids, temperature, seed, position, columns, scores):  # type: ignore[no-untyped-def]
    """The k best columns of each perturbed row; see `sampling_draft.choose_top_k_drafts`."""
    k = columns.shape[1]
    block_max = np.empty(num_blocks(vocab), np.int32)
    codes = np.empty(2 * k + BLOCK, np.int64)
    perturbed = np.empty(vocab, np.float32)
    for i in range(columns.shape[0]):
        row = flat[i * stride : i * stride + vocab]
        top_key = block_maxima(row, block_max)
        for j in range(k):
            columns[i, j] = j
            scores[i, j] = -np.inf
        if top_key == MIN_KEY:
            continue
        if temperature[i] >= MIN_TEMPERATURE:
            low, high = row_keys(seed[i], position[i], np.uint64(0))
            _perturb(row, token_ids, value_of(top_key), temperature[i], low, high, perturbed)
            row = perturbed
            top_key = block_maxima(row, block_max)
        top = value_of(top_key)
        total, _ = exp_sums(row, block_max, top, None, None, None)
        found = best_codes(row, block_max, k, codes)
        for j in range(found):
            columns[i, j] = code_column(codes[j])
            scores[i, j] = (value_of(code_key(codes[j])) - top) - log_sum(total)


@kernel
def _perturb(row, token_ids, top, t, low, high, perturbed):  # type: ignore[no-untyped-def]
    for j in range(row.shape[0]):
        perturbed[j] = (row[j] - top) / t + gumbel(low, high, np.uint32(token_ids[j]))
