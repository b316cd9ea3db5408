"""The drafters' own choice: the target's noise on the drafter's logits. Wrapper and reference.

Knows draft logits and the map to target ids; proposes only, so a bad row costs speed and never
correctness. The kernel is `sampling_draft_numba.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .noise import gumbel
from .rows import flat_blocks, use_numba
from .sampling import MIN_TEMPERATURE, _first_argmax, identity_ids


def choose_drafts(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    target_ids: Tensor | None = None,
    domain: int = 0,
) -> tuple[Tensor, Tensor]:
    """One draft per row: argmax of logits / T + noise of the target id; plain argmax at T = 0.

    Args:
        logits: [n, DV] fp32/bf16/fp16 draft logits (every column is a token).
        temperature: [n] fp32. seed, position: [n] int64; position of the drafted token.
        target_ids: [DV] int64 target id of each draft column, `None` for the same vocabulary.
        domain: noise stream; the target's own in coupled mode.

    Returns:
        target ids [n] int64 and the drafter's logprobs [n] fp32 of softmax(logits / T), with T = 0
        counting as 1. A row with a NaN gives its first column with logprob -inf.
    """
    num_rows, vocab_size = logits.shape
    if use_numba(logits.device):
        from .sampling_draft_numba import draft_rows

        columns = torch.empty(num_rows, dtype=torch.int64)
        logprobs = torch.empty(num_rows, dtype=torch.float32)
        ids = int32_ids(vocab_size, target_ids).numpy()
        params = [p.contiguous().numpy() for p in (temperature, seed, position)]
        for begin, end, flat, stride in flat_blocks(logits, 16):
            draft_rows(
                flat,
                stride,
                vocab_size,
                ids,
                *(p[begin:end] for p in params),
                domain,
                columns[begin:end].numpy(),
                logprobs[begin:end].numpy(),
            )
    else:
        scores, log_q = _perturbed(logits, temperature, seed, position, target_ids, domain)
        columns = _first_argmax(scores)
        logprobs = log_q.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
        is_bad = logprobs.isnan()
        columns = torch.where(is_bad, 0, columns)
        logprobs = torch.where(is_bad, -torch.inf, logprobs)
    return (columns if target_ids is None else target_ids[columns]), logprobs


def choose_top_k_drafts(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    k: int,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best drafts per row for a tree, by perturbed logits, best first.

    Arguments as in `choose_drafts`; k <= DV.

    Returns:
        target ids [n, k] int64 and scores [n, k] fp32: the log-softmax of the perturbed logits,
        which at T = 0 is log q. A row with a NaN gives its first columns with score -inf.
    """
    num_rows, vocab_size = logits.shape
    assert 1 <= k <= vocab_size, f"{k} drafts of {vocab_size} columns"
    if use_numba(logits.device):
        from .sampling_draft_numba import top_k_draft_rows

        columns = torch.empty((num_rows, k), dtype=torch.int64)
        scores = torch.empty((num_rows, k), dtype=torch.float32)
        ids = int32_ids(vocab_size, target_ids).numpy()
        params = [p.contiguous().numpy() for p in (temperature, seed, position)]
        for begin, end, flat, stride in flat_blocks(logits, 16):
            top_k_draft_rows(
                flat,
                stride,
                vocab_size,
                ids,
                *(p[begin:end] for p in params),
                columns[begin:end].numpy(),
                scores[begin:end].numpy(),
            )
    else:
        perturbed, _ = _perturbed(logits, temperature, seed, position, target_ids, 0)
        values, order = torch.sort(perturbed, dim=-1, descending=True, stable=True)
        columns = order[:, :k]
        scores = values[:, :k] - perturbed.logsumexp(-1, keepdim=True)
        is_bad = scores.isnan().any(-1, keepdim=True)
        columns = torch.where(is_bad, torch.arange(k, device=logits.device), columns)
        scores = torch.where(is_bad, -torch.inf, scores)
    return (columns if target_ids is None else target_ids[columns]), scores


def _perturbed(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    target_ids: Tensor | None,
    domain: int,
) -> tuple[Tensor, Tensor]:
    """Perturbed (l - max) / T and log q, both [n, DV] fp32: drafters' rows are few."""
    logits = logits.float()
    is_greedy = temperature < MIN_TEMPERATURE
    t = torch.where(is_greedy, 1.0, temperature).unsqueeze(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / t
    ids = torch.arange(logits.shape[1], device=logits.device) if target_ids is None else target_ids
    noise = gumbel(seed, position, ids, domain)
    noise = noise * (~is_greedy).to(torch.float32).unsqueeze(-1)
    return scaled + noise, scaled.log_softmax(-1)


@lru_cache(maxsize=8)
def int32_ids(vocab_size: int, target_ids: Tensor | None) -> Tensor:
    """Target ids of the draft columns, [vocab_size] int32, shared: do not modify.

    A tensor is its own key, so `target_ids` must not change either.
    """
    return identity_ids(vocab_size) if target_ids is None else target_ids.to(torch.int32)
