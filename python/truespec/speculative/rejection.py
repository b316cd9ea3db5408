"""Rejection verification of chains: accept with min(1, p / q), else sample max(p - q, 0).

Knows drafts, their draft logits, and the target's sampled rows. The output follows the target's
distribution exactly (arXiv 2302.01318) but depends on the drafts, unlike coupled verification.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from truespec.kernels.logprob import (
    PROCESSED,
    TEMPERATURE,
    EditedRows,
    SlotQuestions,
    answer_slots,
)
from truespec.kernels.noise import DOMAIN_ACCEPT, DOMAIN_RESIDUAL, hash24
from truespec.kernels.paths import pack_paths
from truespec.kernels.sampling import MIN_TEMPERATURE, is_kept
from truespec.layers.sampler import SampledRows, SamplingRows

from .contract import Draft, Verdict


@dataclass(frozen=True, slots=True)
class Coins:
    """Uniform fp64 numbers in (0, 1) per target row: to test its child, and for its own token.

    The two streams and the drafts' noise are independent of each other.
    """

    accept: Tensor
    residual: Tensor


def draw_coins(rows: SamplingRows) -> Coins:
    """The coins of each row: a hash of its seed, position and purpose."""
    return Coins(
        accept=_uniform48(rows.seed, rows.position, DOMAIN_ACCEPT),
        residual=_uniform48(rows.seed, rows.position, DOMAIN_RESIDUAL),
    )


def verify_rejection(
    draft: Draft,
    logits: Tensor,
    sampled: SampledRows,
    temperature: Tensor,
    coins: Coins,
    *,
    vocab_size: int,
) -> Verdict:
    """Accept drafts from the root on while their coins allow, then draw from the residual.

    p is the processed target distribution, filters included; q is softmax(draft logits / T), from
    which the drafts must have been drawn with a stream of their own. A NaN in q rejects the draft
    and counts as q = 0. At T = 0 both reduce to comparing with the argmax.

    Args:
        draft: chains, with `logits` [num_rows, V] over the target's vocabulary.
        logits: [num_rows, V_padded] edited target logits. sampled: the sampler's answer to them.
        temperature: [num_rows] fp32.
    """
    assert draft.logits is not None, "rejection needs the draft logits"
    num_rows = draft.token_ids.shape[0]
    rows = torch.arange(num_rows, device=draft.parents.device)
    is_root = draft.parents < 0
    assert bool((is_root | (draft.parents == rows - 1)).all()), "rejection takes chains only"
    parents = draft.parents.clamp_min(0)
    is_greedy = temperature[parents] < MIN_TEMPERATURE
    edited = EditedRows(logits, temperature, sampled.keep_threshold, sampled.tie_id)
    p_x = _chosen_probs(edited, parents, draft.token_ids, PROCESSED, vocab_size)
    q_rows = EditedRows(draft.logits, temperature[parents], sampled.keep_threshold, sampled.tie_id)
    q_x = _chosen_probs(q_rows, rows, draft.token_ids, TEMPERATURE, vocab_size)
    by_coin = accepts(p_x, q_x, coins.accept[parents])
    by_argmax = draft.token_ids == sampled.token_ids[parents]
    is_accepted = torch.where(is_greedy, by_argmax, by_coin) & ~sampled.failed[parents]
    return _emit(draft, edited, sampled, is_accepted & ~is_root, coins, vocab_size)


def accepts(p_x: Tensor, q_x: Tensor, coins: Tensor) -> Tensor:
    """Whether drafts pass: coin * q(x) < p(x), with q(x) > 0. A NaN q(x) fails. All [n] fp64."""
    return (q_x > 0) & (coins * q_x < p_x)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[V] fp64 unnormalised max(p - q, 0); p itself where nothing is left or q has a NaN."""
    rest = (p - q).clamp_min(0.0)
    has_rest = rest.sum() > 0  # False for NaN
    return torch.where(has_rest, rest, p)


def pick(weights: Tensor, coin: Tensor) -> Tensor:
    """The token in whose share of the cumulative weights [V] fp64 the coin falls. int64 scalar."""
    edges = weights.cumsum(0)
    token = torch.searchsorted(edges, coin * edges[-1], right=True)
    last = (weights > 0).nonzero()[-1, 0]  # rounding at the end must not name an impossible token
    return torch.minimum(token, last)


def _emit(
    draft: Draft,
    edited: EditedRows,
    sampled: SampledRows,
    is_accepted: Tensor,
    coins: Coins,
    vocab_size: int,
) -> Verdict:
    """Accepted prefixes as a verdict; the last row of each gets its own token."""
    cu_rows = draft.cu_rows.tolist()
    accepted = is_accepted.tolist()
    is_path = torch.zeros_like(is_accepted)
    token_ids = draft.token_ids.roll(-1)  # an accepted row's token is its child's
    for begin, end in pairwise(cu_rows):
        last = begin
        while last + 1 < end and accepted[last + 1]:
            last += 1
        is_path[begin : last + 1] = True
        if bool(sampled.failed[last]):
            continue
        if end == begin + 1:  # no drafts: plain decoding
            token_ids[last] = sampled.token_ids[last]
            continue
        rejected = last + 1 if last + 1 < end else None
        token_ids[last] = _final_token(draft, edited, sampled, last, rejected, coins, vocab_size)
    max_rows = max(end - begin for begin, end in pairwise(cu_rows))
    return Verdict(*pack_paths(draft.cu_rows, is_path, token_ids, sampled.failed, max_rows))


def _final_token(
    draft: Draft,
    edited: EditedRows,
    sampled: SampledRows,
    row: int,
    rejected: int | None,
    coins: Coins,
    vocab_size: int,
) -> Tensor:
    """The target's own token at `row`: a draw from p, or from the residual after a rejection."""
    t = edited.temperature[row]
    if bool(t < MIN_TEMPERATURE):
        return sampled.token_ids[row]
    x = edited.logits[row, :vocab_size].to(torch.float32)
    kept = is_kept(x, torch.arange(vocab_size), edited.keep_threshold[row], edited.tie_id[row])
    p = _softmax(torch.where(kept, x, -torch.inf), t)
    if rejected is None:
        return pick(p, coins.residual[row])
    assert draft.logits is not None
    q = _softmax(draft.logits[rejected, :vocab_size].to(torch.float32), t)
    return pick(residual(p, q), coins.residual[row])


def _softmax(x: Tensor, t: Tensor) -> Tensor:
    """[V] fp64, the distribution whose logprobs the kernels give."""
    return ((x - x.amax()) / t).to(torch.float64).softmax(-1)


def _chosen_probs(
    rows: EditedRows, row_index: Tensor, token_ids: Tensor, mode: int, vocab_size: int
) -> Tensor:
    """[n] fp64 probability of each token in its row: 0 where filtered or the row has a NaN."""
    num_slots = token_ids.shape[0]
    questions = SlotQuestions(
        token_ids=token_ids[None],
        row_index=row_index[None],
        num_tokens=torch.tensor([num_slots], dtype=torch.int32),
        k=torch.zeros(1, dtype=torch.int32),
        modes=torch.tensor([[mode]], dtype=torch.int8),
        asked_ids=torch.empty(0, dtype=torch.int64),
        cu_asked=torch.zeros(2, dtype=torch.int32),
    )
    answers = answer_slots(rows.logits, vocab_size, questions, rows, k_max=0, a_max=0)
    return answers.chosen[0, 0].to(torch.float64).exp().nan_to_num(nan=0.0)


def _uniform48(seed: Tensor, position: Tensor, domain: int) -> Tensor:
    """[n] fp64 uniform in (0, 1) from two 24-bit hashes, finer than the smallest fp32 share."""
    high, low = hash24(seed, position, torch.arange(2), domain).to(torch.float64).unbind(-1)
    return (high * 2.0**24 + low + 0.5) * 2.0**-48
