"""Chains of drafts whose logits depend on the draft before: the whole chain as one call.

DSpark's low-rank transition (arXiv 2607.05147) in its memoryless form, with the choice of
`sampling_draft.py` at every step. Wrapper and reference; the kernel is `draft_chain_numba.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import use_numba
from .sampling_draft import choose_drafts, int32_ids


@dataclass(frozen=True, slots=True)
class Transition:
    """B = W2 W1[x]: what a draft adds to the logits of the next one.

    Attributes:
        w1: [V, r] fp32, a row per target id.
        w2: [r, DV] bf16, contiguous: every draft reads all of it, from memory.
    """

    w1: Tensor
    w2: Tensor


def choose_chains(
    logits: Tensor,
    previous: Tensor,
    transition: Transition,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    target_ids: Tensor | None = None,
    domain: int = 0,
) -> tuple[Tensor, Tensor]:
    """k drafts per row, each with the bias of the one before.

    Args:
        logits: [n, k, DV] fp32, contiguous; the biases are added in place.
        previous: [n] int64 target ids before the first draft.
        temperature: [n] fp32. seed, position: [n] int64; position of the first draft.
        target_ids, domain: as in `choose_drafts`.

    Returns:
        target ids [n, k] int64 and logprobs [n, k] fp32, as `choose_drafts` gives them.
    """
    num_rows, num_steps, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, num_steps, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, num_steps, device=logits.device)
    if use_numba(logits.device):
        from .draft_chain_numba import chain_rows

        assert logits.is_contiguous(), logits.stride()
        chain_rows(
            logits.numpy(),
            previous.contiguous().numpy(),
            transition.w1.numpy(),
            transition.w2.view(torch.int16).numpy(),
            int32_ids(vocab_size, target_ids).numpy(),
            *(p.contiguous().numpy() for p in (temperature, seed, position)),
            domain,
            token_ids.numpy(),
            logprobs.numpy(),
        )
        return token_ids, logprobs
    for step in range(num_steps):
        row = logits[:, step]
        row += transition.w1[previous] @ transition.w2.float()
        previous, logprobs[:, step] = choose_drafts(
            row, temperature, seed, position + step, target_ids, domain
        )
        token_ids[:, step] = previous
    return token_ids, logprobs
