"""Numba kernel of `draft_chain.py`: all steps of all chains, a step of every chain at a time."""

from __future__ import annotations

import math

import numpy as np

from .jit import inline_kernel, kernel
from .row_scan import num_blocks
from .sampling_draft_numba import draft_row

_RANKS = 4
_HALF = np.int32(16)


@inline_kernel
def _wide(bits):  # type: ignore[no-untyped-def]
    """The fp32 number of a bf16."""
    return np.int32(np.int32(bits) << _HALF).view(np.float32)


@kernel
def chain_rows(  # type: ignore[no-untyped-def]
    logits, w1, w2, ids, keys, domain, confidence, token_ids, logprobs, confidences
):
    """k drafts per row; see `draft_chain.choose_chains`.

    Args:
        w2: tiles, with the bits of bf16 as int16.
        keys: previous ids, temperature, seed, position, each [n].
        confidence: weight, bias, temperatures, hidden; an empty weight asks for none.
        token_ids, logprobs, confidences: [n, k], written; the last if they are asked.
    """
    num_rows, num_steps, vocab = logits.shape
    previous, temperature, seed, position = keys
    block_max = np.empty(num_blocks(vocab), np.int32)
    last = previous.copy()
    for step in range(num_steps):
        if confidence[0].shape[0] > 0:
            for i in range(num_rows):
                confidences[i, step] = _confidence(confidence, i, step, w1[last[i]])
        for tile in range(w2.shape[0]):
            begin = tile * w2.shape[2]
            end = min(begin + w2.shape[2], vocab)
            for i in range(num_rows):
                _add_product(logits[i, step, begin:end], w1[last[i]], w2[tile])
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
def _add_product(y, x, w):  # type: ignore[no-untyped-def]
    """y += x w in the first columns of a tile `w` [r, TILE], which holds the bits of bf16."""
    size = y.shape[0]
    rank = x.shape[0]
    whole = rank - rank % _RANKS
    for r in range(0, whole, _RANKS):
        a, b, c, d = x[r], x[r + 1], x[r + 2], x[r + 3]
        wa, wb, wc, wd = w[r], w[r + 1], w[r + 2], w[r + 3]
        for j in range(size):
            y[j] += (a * _wide(wa[j]) + b * _wide(wb[j])) + (c * _wide(wc[j]) + d * _wide(wd[j]))
    for r in range(whole, rank):
        wr = w[r]
        for j in range(size):
            y[j] += x[r] * _wide(wr[j])


@kernel
def _confidence(confidence, i, step, embedded):  # type: ignore[no-untyped-def]
    """sigmoid((w [h; W1[x]] + b) / T); a weight as wide as h leaves W1[x] out."""
    weight, bias, temperatures, hidden = confidence
    width = hidden.shape[2]
    score = _dot(weight[:width], hidden[i, step]) + bias[0]
    if weight.shape[0] > width:
        score += _dot(weight[width:], embedded)
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(score / temperatures[step]))))


@kernel
def _dot(x, y):  # type: ignore[no-untyped-def]
    """In several sums, so that one addition need not wait for the one before."""
    size = x.shape[0]
    whole = size - size % _RANKS
    a = b = c = d = np.float32(0.0)
    for i in range(0, whole, _RANKS):
        a += x[i] * y[i]
        b += x[i + 1] * y[i + 1]
        c += x[i + 2] * y[i + 2]
        d += x[i + 3] * y[i + 3]
    for i in range(whole, size):
        a += x[i] * y[i]
    return (a + b) + (c + d)
