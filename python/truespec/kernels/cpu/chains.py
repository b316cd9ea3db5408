"""What compiled code reads of the rule that chains of drafts follow (chain_step.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.kernels.draft_chain import TILE, ChainRule

from . import layout as at
from .small import Fields, address_of

Made = tuple[Tensor, Tensor, Tensor | None]  # token ids, logprobs, confidences: [n, k] each


def fill_chains(fields: Fields, rule: ChainRule, num_steps: int) -> tuple[Tensor, Made]:
    """Write a rule into a record.

    Returns the ids that compiled code goes on from, which the caller keeps alive, and what it will
    write.
    """
    f, n = fields, rule.previous.shape[0]
    w1, w2 = rule.transition.w1, rule.transition.w2
    assert w1.is_contiguous(), w1.stride()
    assert w2.dtype == torch.bfloat16, w2.dtype
    f[at.NUM_TARGET_IDS], f[at.RANK] = w1.shape
    f[at.W1], f[at.W2] = w1.data_ptr(), w2.data_ptr()
    f[at.NUM_TILES], f[at.TILE_COLUMNS] = w2.shape[0], TILE
    last = rule.previous.clone()
    f[at.LAST_IDS] = last.data_ptr()
    f[at.TARGET_IDS] = address_of(rule.target_ids, torch.int32)
    f[at.TEMPERATURES] = address_of(rule.temperature, torch.float32)
    f[at.SEEDS] = address_of(rule.seed, torch.int64)
    f[at.DRAFT_POSITIONS] = address_of(rule.position, torch.int64)
    f[at.DOMAIN] = rule.domain
    token_ids = torch.empty(n, num_steps, dtype=torch.int64)
    logprobs, confidences = torch.empty(n, num_steps), torch.empty(n, num_steps)
    f[at.DRAFT_IDS], f[at.LOGPROBS] = token_ids.data_ptr(), logprobs.data_ptr()
    f[at.CONFIDENCES], f[at.CONFIDENCE] = confidences.data_ptr(), 0
    if rule.confidence is None:
        return last, (token_ids, logprobs, None)
    sure = rule.confidence
    f[at.CONFIDENCE] = address_of(sure.weight, torch.float32)
    f[at.CONFIDENCE_SIZE], f[at.CONFIDENCE_BIAS] = sure.weight.numel(), sure.bias.data_ptr()
    f[at.CONFIDENCE_TEMPERATURES] = address_of(sure.temperatures, torch.float32)
    return last, (token_ids, logprobs, confidences)
