"""Choosing one token per row: filters, noise, argmax. Wrapper and torch reference.

Knows tensors of logits and per-row parameters; the kernel is `sampling_numba.py`. All filters keep
a prefix of the order (logit descending, id ascending), so (threshold, tie id) describes the kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .noise import gumbel, mass_fixed
from .rows import flat_blocks, run_row_ranges, use_numba

MIN_TEMPERATURE = 2.0**-126  # less is argmax: a subnormal divisor has no stable meaning
_REFERENCE_ELEMENTS = 2**20  # the reference works on so many logits at a time


def choose_tokens(
    logits: Tensor,
    vocab_size: int,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sampler on every row; deterministic, and a row's result depends on that row alone.

    Args:
        logits: [n, >= vocab_size] fp32/bf16/fp16, not modified; further columns are padding.
        temperature: [n] fp32, 0 is argmax without filters. top_k: [n] int32, 0 keeps all.
        top_p: [n] fp64. log_min_p: [n] fp64, -inf keeps all. seed, position: [n] int64.
            All of them are contiguous.

    Returns:
        ids [n] int64 (-1 where failed), failed [n] bool (NaN, +inf or nothing but -inf in the row),
        threshold [n] fp32 and tie id [n] int64: kept is logit > threshold, or logit == threshold
        and id <= tie id; (-inf, -1) where no filter acts.
    """
    num_rows = logits.shape[0]
    rows = (temperature, top_k, top_p, log_min_p, seed, position)
    shapes = [tuple(row.shape) for row in rows]
    assert shapes == [(num_rows,)] * len(rows), f"parameters of {shapes}, {num_rows} rows"
    assert logits.shape[1] >= vocab_size, f"{logits.shape[1]} columns, vocabulary {vocab_size}"
    if use_numba(logits.device):
        return _choose_numba(logits, vocab_size, rows)
    step = max(1, _REFERENCE_ELEMENTS // max(1, vocab_size))
    results = [
        choose_reference(
            logits[begin : begin + step, :vocab_size].float(),
            *(row[begin : begin + step] for row in rows),
        )
        for begin in range(0, max(1, num_rows), step)
    ]
    ids, failed, threshold, tie_id = map(torch.cat, zip(*results, strict=True))
    return ids, failed, threshold, tie_id


def choose_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`choose_tokens` by a full sort; fp32 logits [n, V], `log_min_p` [n] fp64, rest as there."""
    vocab_size = logits.shape[1]
    ids = torch.arange(vocab_size, device=logits.device)
    top = logits.amax(-1, keepdim=True)
    failed = ~top.isfinite().squeeze(-1)
    is_greedy = temperature < MIN_TEMPERATURE
    t = torch.where(is_greedy, 1.0, temperature).unsqueeze(-1)
    scaled = torch.where(failed.unsqueeze(-1), 0.0, (logits - top) / t)

    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    sorted_scaled = scaled.gather(-1, order)
    num_kept = _num_kept(sorted_scaled, top_k, top_p, log_min_p)
    last = (num_kept - 1).unsqueeze(-1)
    filters = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (log_min_p > -torch.inf)
    filters &= ~is_greedy & ~failed
    threshold = torch.where(filters, values.gather(-1, last).squeeze(-1), -torch.inf)
    tie_id = torch.where(filters, order.gather(-1, last).squeeze(-1), -1)

    noise = gumbel(seed, position, ids) * (~is_greedy).to(torch.float32).unsqueeze(-1)
    kept = is_kept(logits, ids, threshold.unsqueeze(-1), tie_id.unsqueeze(-1))
    scores = torch.where(kept, scaled + noise, -torch.inf)
    token_ids = _first_argmax(scores)
    return torch.where(failed, -1, token_ids), failed, threshold, tie_id


def is_kept(logits: Tensor, ids: Tensor, threshold: Tensor, tie_id: Tensor) -> Tensor:
    """Whether the filters keep a token of a row; shapes broadcast."""
    return (logits > threshold) | ((logits == threshold) & (ids <= tie_id))


@lru_cache(maxsize=8)
def identity_ids(vocab_size: int) -> Tensor:
    """[vocab_size] int32 counting up from 0, shared: do not modify."""
    return torch.arange(vocab_size, dtype=torch.int32)


def _choose_numba(
    logits: Tensor, vocab_size: int, rows: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    params = tuple([row.numpy() for row in rows])
    out = (
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.bool_),
        np.empty(num_rows, np.float32),
        np.empty(num_rows, np.int64),
    )
    ids = identity_ids(vocab_size).numpy()
    for begin, end, flat, stride in flat_blocks(logits, 16):
        args = (flat, stride, begin, vocab_size, ids, params, out)
        run_row_ranges(_kernel(), begin, end, vocab_size, args)
    token_ids, failed, threshold, tie_id = map(torch.from_numpy, out)
    return token_ids, failed, threshold, tie_id


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    from .sampling_numba import sample_rows

    return sample_rows


def _num_kept(sorted_scaled: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """How many of the sorted (l - max) / T the filters keep, at least 1. [n] int64."""
    vocab_size = sorted_scaled.shape[1]
    rank = torch.arange(vocab_size, device=sorted_scaled.device)
    kept = (sorted_scaled > -torch.inf).sum(-1)
    kept = torch.where(top_k > 0, torch.minimum(kept, top_k.to(torch.int64)), kept)
    mass = mass_fixed(sorted_scaled) * (rank < kept.unsqueeze(-1))
    total = mass.sum(-1)
    target = (top_p * total.to(torch.float64)).ceil().to(torch.int64)
    target = torch.minimum(target.clamp_min(1), total)
    crossing = (mass.cumsum(-1) < target.unsqueeze(-1)).sum(-1) + 1
    kept = torch.where(top_p < 1, torch.minimum(kept, crossing), kept)
    above = (sorted_scaled.to(torch.float64) >= log_min_p.unsqueeze(-1)).sum(-1)
    return torch.minimum(kept, above).clamp_min(1)


def _first_argmax(scores: Tensor) -> Tensor:
    """Lowest index of each row's maximum: [n] int64, any index where the row holds a NaN."""
    size = scores.shape[-1]
    ids = torch.arange(size, device=scores.device)
    is_best = scores == scores.amax(-1, keepdim=True)
    return torch.where(is_best, ids, size - 1).amin(-1)
