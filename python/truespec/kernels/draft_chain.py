"""Chains of drafts whose logits depend on the draft before: the whole chain as one call.

DSpark's low-rank transition (arXiv 2607.05147) in its memoryless form, with the choice of
`sampling_draft.py` at every step. Wrapper and reference; the kernel is `draft_chain_numba.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rows import use_numba
from .sampling_draft import choose_drafts, int32_ids

TILE = 256  # columns of W2, and of a row of logits, that stay in the nearest cache

_NOTHING = np.empty(0, np.float32)
_NOT_ASKED = (_NOTHING, _NOTHING, _NOTHING, np.empty((0, 0, 0), np.float32))


@dataclass(frozen=True)
class Transition:
    """B = W2 W1[x]: what a draft adds to the logits of the next one.

    Attributes:
        w1: [V, r] fp32, a row per target id.
        w2: [ceil(DV / TILE), r, TILE] bf16 of `tiled`: every draft reads all of it, in order.
    """

    w1: Tensor
    w2: Tensor

    @cached_property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
        """Both for the kernel, W2 as the bits of bf16."""
        return self.w1.numpy(), self.w2.view(torch.int16).numpy()


@dataclass(frozen=True, slots=True)
class Confidence:
    """c_k = sigmoid((w [h_k; W1[x_{k-1}]] + b) / T_k): probability that draft k is accepted.

    Attributes:
        weight: [H + r] fp32, or [H] where the previous token x_{k-1} does not count.
        bias: [1] fp32.
        temperatures: [>= k] fp32 T of each step.
        hidden: [n, k, H] fp32 h, contiguous.
    """

    weight: Tensor
    bias: Tensor
    temperatures: Tensor
    hidden: Tensor


class Chains(NamedTuple):
    """k drafts for each of n rows.

    Attributes:
        token_ids: [n, k] int64 target ids.
        logprobs: [n, k] fp32 as `choose_drafts` gives them.
        confidences: [n, k] fp32 in (0, 1), `None` where they were not asked for.
    """

    token_ids: Tensor
    logprobs: Tensor
    confidences: Tensor | None


def tiled(w2: Tensor) -> Tensor:
    """W2 [DV, r] as the kernel reads it: tile by tile, zeros behind the last column."""
    num_columns, rank = w2.shape
    num_tiles = -(-num_columns // TILE)
    padded = torch.nn.functional.pad(w2, (0, 0, 0, num_tiles * TILE - num_columns))
    return padded.view(num_tiles, TILE, rank).transpose(1, 2).contiguous()


def choose_chains(
    logits: Tensor,
    previous: Tensor,
    transition: Transition,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    target_ids: Tensor | None = None,
    domain: int = 0,
    confidence: Confidence | None = None,
) -> Chains:
    """k drafts per row, each with the bias of the one before.

    Args:
        logits: [n, k, DV] fp32, contiguous; the biases are added in place.
        previous: [n] int64 target ids before the first draft.
        temperature: [n] fp32. seed, position: [n] int64; position of the first draft. These and
            `previous` are contiguous.
        target_ids, domain: as in `choose_drafts`.
        confidence: `None` leaves the confidences out.
    """
    assert logits.is_contiguous(), logits.stride()
    shape, vocab_size, device = logits.shape[:2], logits.shape[2], logits.device
    if use_numba(device):
        w1, w2 = transition.arrays
        keys = tuple([p.numpy() for p in (previous, temperature, seed, position)])
        out = np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape, np.float32)
        asked = _NOT_ASKED if confidence is None else _arrays(confidence)
        ids = int32_ids(vocab_size, target_ids).numpy()
        _kernel()(logits.numpy(), w1, w2, ids, keys, domain, asked, *out)
        token_ids, logprobs, confidences = map(torch.from_numpy, out)
        return Chains(token_ids, logprobs, None if confidence is None else confidences)
    token_ids = torch.empty(shape, dtype=torch.int64, device=device)
    logprobs = torch.empty(shape, device=device)
    confidences = torch.empty(shape, device=device)
    w2 = transition.w2.float().transpose(0, 1).flatten(1)[:, :vocab_size]
    for step in range(shape[1]):
        embedded = transition.w1[previous]
        if confidence is not None:
            confidences[:, step] = _confidences(confidence, step, embedded)
        row = logits[:, step]
        row += embedded @ w2
        previous, logprobs[:, step] = choose_drafts(
            row, temperature, seed, position + step, target_ids, domain
        )
        token_ids[:, step] = previous
    return Chains(token_ids, logprobs, None if confidence is None else confidences)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    from .draft_chain_numba import chain_rows

    return chain_rows


def _arrays(confidence: Confidence) -> tuple[NDArray[np.float32], ...]:
    c = confidence
    assert c.hidden.is_contiguous(), c.hidden.stride()
    return c.weight.numpy(), c.bias.numpy(), c.temperatures.numpy(), c.hidden.numpy()


def _confidences(confidence: Confidence, step: int, embedded: Tensor) -> Tensor:
    """[n] of one step; `embedded` [n, r] rows of W1."""
    hidden = confidence.hidden[:, step]
    width = hidden.shape[1]
    score = hidden @ confidence.weight[:width] + confidence.bias
    if len(confidence.weight) > width:
        score = score + embedded @ confidence.weight[width:]
    return torch.sigmoid(score / confidence.temperatures[step])
