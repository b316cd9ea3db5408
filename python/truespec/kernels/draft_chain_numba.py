"""Numba kernel of `draft_chain.py`: all steps of all chains, a step of every chain at a time."""

from __future__ import annotations

import numpy as np

from .jit import inline_kernel, kernel
from .row_scan import num_blocks
from .sampling_draft_numba import draft_row

_COLUMNS = 256  # of W2 and of a row of logits that stay in the nearest cache
_RANKS = 4
_HALF = np.int32(16)


@inline_kernel
def _wide(bits):  # type: ignore[no-untyped-def]
    """The fp32 number of a bf16."""
    return np.int32(np.int32(bits) << _HALF).view(np.float32)


@kernel
def chain_rows(  # type: ignore[no-untyped-def]
    logits, previous, w1, w2, ids, temperature, seed, position, domain, token_ids, logprobs
):
    """k drafts per row; see `draft_chain.choose_chains`. `w2` holds the bits of bf16 as int16."""
    num_rows, num_steps, vocab = logits.shape
    block_max = np.empty(num_blocks(vocab), np.int32)
    last = previous.copy()
    for step in range(num_steps):
        for begin in range(0, vocab, _COLUMNS):
            for i in range(num_rows):
                _add_product(logits[i, step], w1[last[i]], w2, begin, min(begin + _COLUMNS, vocab))
        for i in range(num_rows):
            best, logprobs[i, step] = draft_row(
                logits[i, step],
                block_max,
                ids,
                temperature[i],
                seed[i],
                position[i] + step,
                domain,
            )
            last[i] = ids[best]
            token_ids[i, step] = last[i]


@kernel
def _add_product(row, x, w, begin, end):  # type: ignore[no-untyped-def]
    """row += x w in the columns begin .. end - 1; `w` holds the bits of bf16."""
    y = row[begin:end]
    rank = x.shape[0]
    whole = rank - rank % _RANKS
    for r in range(0, whole, _RANKS):
        a, b, c, d = x[r], x[r + 1], x[r + 2], x[r + 3]
        wa, wb = w[r][begin:end], w[r + 1][begin:end]
        wc, wd = w[r + 2][begin:end], w[r + 3][begin:end]
        for j in range(end - begin):
            y[j] += (a * _wide(wa[j]) + b * _wide(wb[j])) + (c * _wide(wc[j]) + d * _wide(wd[j]))
    for r in range(whole, rank):
        wr = w[r][begin:end]
        for j in range(end - begin):
            y[j] += x[r] * _wide(wr[j])
