"""Chains of drafts whose logits depend on the draft before; the torch reference that makes them.

DSpark's low-rank transition (arXiv 2607.05147) in its memoryless form, with the choice of
`sampling_draft.py` at every step. The compiled form is `cpu/chain_step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling_draft import choose_drafts

TILE = 256  # columns of W2, and of a row of logits, that stay in the nearest cache


@dataclass(frozen=True, slots=True)
class Transition:
    """B = W2 W1[x]: what a draft adds to the logits of the next one.

    Attributes:
        w1: [V, r] fp32, a row per target id, contiguous.
        w2: [ceil(DV / TILE), r, TILE] bf16 of `tiled`: every draft reads all of it, in order.
    """

    w1: Tensor
    w2: Tensor


@dataclass(frozen=True, slots=True)
class Confidence:
    """c_k = sigmoid((w [h_k; W1[x_{k-1}]] + b) / T_k): probability that draft k is accepted.

    Attributes:
        weight: [H + r] fp32, or [H] where the previous token x_{k-1} does not count.
        bias: [1] fp32.
        temperatures: [>= k] fp32 T of each step.
    """

    weight: Tensor
    bias: Tensor
    temperatures: Tensor


class ChainRule(NamedTuple):
    """How the drafts of n chains follow from logits. All tensors are contiguous.

    Attributes:
        previous: [n] int64 target ids before the first draft.
        transition: from each draft to the next.
        temperature: [n] fp32. seed, position: [n] int64; position of the first draft.
        target_ids: [DV] int32 target id of every draft column.
        domain: noise stream, as in `choose_drafts`.
        confidence: `None` leaves the confidences out.
        keeps_logits: what the drafts were chosen from is wanted too.
    """

    previous: Tensor
    transition: Transition
    temperature: Tensor
    seed: Tensor
    position: Tensor
    target_ids: Tensor
    domain: int = 0
    confidence: Confidence | None = None
    keeps_logits: bool = False


class Chains(NamedTuple):
    """k drafts for each of n chains.

    Attributes:
        logits: [n, k, DV] fp32 they were chosen from, the transition's part included; `None` where
            they were not asked for.
        token_ids: [n, k] int64 target ids.
        logprobs: [n, k] fp32 as `choose_drafts` gives them.
        confidences: [n, k] fp32 in (0, 1), `None` where they were not asked for.
    """

    logits: Tensor | None
    token_ids: Tensor
    logprobs: Tensor
    confidences: Tensor | None


def tiled(w2: Tensor) -> Tensor:
    """W2 [DV, r] as the kernel reads it: tile by tile, zeros behind the last column."""
    num_columns, rank = w2.shape
    num_tiles = -(-num_columns // TILE)
    padded = torch.nn.functional.pad(w2, (0, 0, 0, num_tiles * TILE - num_columns))
    return padded.view(num_tiles, TILE, rank).transpose(1, 2).contiguous()


def choose_chains(logits: Tensor, hidden: Tensor, rule: ChainRule) -> Chains:
    """k drafts per chain, each with the bias of the one before; the reference.

    Args:
        logits: [n, k, DV] fp32, modified.
        hidden: [n, k, H] fp32 that they were made from.
    """
    num_steps, vocab_size = logits.shape[1:]
    w2 = rule.transition.w2.float().transpose(0, 1).flatten(1)[:, :vocab_size]
    ids, previous = rule.target_ids.long(), rule.previous
    steps: list[tuple[Tensor, Tensor]] = []
    confidences: list[Tensor] = []
    for step in range(num_steps):
        embedded = rule.transition.w1[previous]
        if rule.confidence is not None:
            confidences.append(_confidences(rule.confidence, hidden[:, step], step, embedded))
        row = logits[:, step]
        row += embedded @ w2
        at = rule.position + step
        steps.append(choose_drafts(row, rule.temperature, rule.seed, at, ids, rule.domain))
        previous = steps[-1][0]
    token_ids, logprobs = (torch.stack(part, dim=1) for part in zip(*steps, strict=True))
    kept = logits if rule.keeps_logits else None
    return Chains(
        kept, token_ids, logprobs, torch.stack(confidences, dim=1) if confidences else None
    )


def _confidences(confidence: Confidence, hidden: Tensor, step: int, embedded: Tensor) -> Tensor:
    """[n] of one step; `hidden` [n, H], `embedded` [n, r] rows of W1."""
    width = hidden.shape[1]
    score = hidden @ confidence.weight[:width] + confidence.bias
    if len(confidence.weight) > width:
        score = score + embedded @ confidence.weight[width:]
    return torch.sigmoid(score / confidence.temperatures[step])
