"""Chains of drafts as compiled Python: all steps of all chains, a step of every chain at a time.

Threads share the columns of a transition, then the chains of which they choose a draft; how work
is split never changes a result. See `kernels/draft_chain.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from truespec.kernels.row_scan import num_blocks
from truespec.kernels.sampling_draft_numba import draft_row

from .layout import (
    BLOCK_ROWS,
    CONFIDENCE,
    CONFIDENCE_BIAS,
    CONFIDENCE_SIZE,
    CONFIDENCE_TEMPERATURES,
    CONFIDENCES,
    DOMAIN,
    DRAFT_IDS,
    DRAFT_POSITIONS,
    FIRST_DRAFT_ROW,
    HIDDEN,
    LAST_IDS,
    LOGITS,
    LOGITS_STRIDE,
    LOGPROBS,
    NUM_DRAFT_IDS,
    NUM_ROWS,
    NUM_STEPS,
    NUM_TARGET_IDS,
    NUM_TILES,
    OUTPUT,
    RANK,
    SEEDS,
    TARGET_IDS,
    TEMPERATURES,
    TILE_COLUMNS,
    W1,
    W2,
)
from .native import Ints, array, compiled, float32s, int16s, int32s, int64s
from .phases import barrier, share

Floats = NDArray[np.float32]

_RANKS = 4
_HALF = np.int32(16)


def draft_chains(thread: int, num_threads: int, record: int, barriers: int) -> int:
    """NUM_STEPS drafts for each block of BLOCK_ROWS rows, from LOGITS and OUTPUT; returns 0."""
    r = int64s(record)
    num_steps, vocab, rank = r[NUM_STEPS], r[NUM_DRAFT_IDS], r[RANK]
    num_chains = r[NUM_ROWS] // r[BLOCK_ROWS]
    w1 = array(float32s(r[W1]), (r[NUM_TARGET_IDS], rank))
    w2 = array(int16s(r[W2]), (r[NUM_TILES], rank, r[TILE_COLUMNS]))
    target_ids = array(int32s(r[TARGET_IDS]), vocab)
    last = array(int64s(r[LAST_IDS]), num_chains)
    temperatures = array(float32s(r[TEMPERATURES]), num_chains)
    seeds = array(int64s(r[SEEDS]), num_chains)
    positions = array(int64s(r[DRAFT_POSITIONS]), num_chains)
    token_ids = array(int64s(r[DRAFT_IDS]), (num_chains, num_steps))
    logprobs = array(float32s(r[LOGPROBS]), (num_chains, num_steps))
    confidences = array(float32s(r[CONFIDENCES]), (num_chains, num_steps))
    block_max = np.empty(num_blocks(vocab), np.int32)
    first, end = share(r[NUM_TILES], thread, num_threads)
    for step in range(num_steps):
        for tile in range(first, end):
            for i in range(num_chains):
                begin = tile * r[TILE_COLUMNS]
                logits = _draft_logits(r, i, step)
                _add_product(logits[begin : begin + r[TILE_COLUMNS]], w1[last[i]], w2[tile])
        if r[CONFIDENCE] != 0:
            for i in range(thread, num_chains, num_threads):
                confidences[i, step] = _confidence(r, i, step, w1[last[i]])
        barriers = barrier(r, num_threads, barriers)
        for i in range(thread, num_chains, num_threads):
            best, logprobs[i, step] = draft_row(
                _draft_logits(r, i, step),
                block_max,
                target_ids,
                temperatures[i],
                seeds[i],
                positions[i] + step,
                r[DOMAIN],
            )
            last[i] = target_ids[best]
            token_ids[i, step] = last[i]
        barriers = barrier(r, num_threads, barriers)
    return 0


@compiled
def _draft_row_index(r: Ints, i: int, step: int) -> int:
    return i * r[BLOCK_ROWS] + r[FIRST_DRAFT_ROW] + step


@compiled
def _draft_logits(r: Ints, i: int, step: int) -> Floats:
    """[DV] of a step of a chain."""
    at = r[LOGITS] + _draft_row_index(r, i, step) * r[LOGITS_STRIDE] * 4
    return array(float32s(at), r[NUM_DRAFT_IDS])


@compiled
def _wide(bits: np.int16) -> np.float32:
    """The fp32 number of a bf16."""
    return np.int32(np.int32(bits) << _HALF).view(np.float32)


@compiled
def _add_product(y: Floats, x: Floats, w: NDArray[np.int16]) -> None:
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


@compiled
def _confidence(r: Ints, i: int, step: int, embedded: Floats) -> np.float32:
    """sigmoid((w [h; W1[x]] + b) / T); a weight as wide as h leaves W1[x] out."""
    width = r[HIDDEN]
    weight = array(float32s(r[CONFIDENCE]), r[CONFIDENCE_SIZE])
    at = r[OUTPUT] + _draft_row_index(r, i, step) * width * 4
    score = _dot(weight[:width], array(float32s(at), width))
    score += array(float32s(r[CONFIDENCE_BIAS]), 1)[0]
    if r[CONFIDENCE_SIZE] > width:
        score += _dot(weight[width:], embedded)
    temperature = array(float32s(r[CONFIDENCE_TEMPERATURES]), step + 1)[step]
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(score / temperature))))


@compiled
def _dot(x: Floats, y: Floats) -> np.float32:
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
