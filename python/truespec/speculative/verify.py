"""Coupled verification: walk each draft while it equals what the target sampled.

Knows drafts and sampled rows, for chains and trees alike; knows no model, drafter or worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.layers.sampler import SampledRows

from .contract import Draft, Verdict


def verify(draft: Draft, sampled: SampledRows) -> Verdict:
    """Emit the sampled tokens along the path that the draft got right, and one more.

    From the root: emit the row's sampled token; go on in the child that holds this token (of equal
    siblings the lowest row), or stop. A failed row ends the path before its token. Loops over the
    depth only; D is the largest number of rows of a request, no device sync.

    Args:
        draft: ragged proposals; `parents` point to lower rows.
        sampled: one choice per row of the draft, in the same order.
    """
    num_rows = draft.token_ids.shape[0]
    assert sampled.token_ids.shape == (num_rows,), (
        f"{tuple(sampled.token_ids.shape)} sampled rows for {num_rows} draft rows"
    )
    next_row = _next_rows(draft, sampled)
    depth = _max_depth(draft)
    row = draft.cu_rows[:-1].to(torch.int64)
    is_open = torch.ones_like(row, dtype=torch.bool)
    failed = torch.zeros_like(is_open)
    tokens, rows = [], []
    for _ in range(depth):
        here = row.clamp_min(0)
        failed = failed | (is_open & sampled.failed[here])
        emits = is_open & ~failed
        tokens.append(torch.where(emits, sampled.token_ids[here], -1))
        rows.append(torch.where(emits, here, -1))
        row = torch.where(emits, next_row[here], -1)
        is_open = row >= 0
    row_index = torch.stack(rows, dim=1)
    return Verdict(
        token_ids=torch.stack(tokens, dim=1),
        row_index=row_index,
        num_tokens=(row_index >= 0).sum(1).to(torch.int32),
        failed=failed,
    )


def _next_rows(draft: Draft, sampled: SampledRows) -> Tensor:
    """[num_rows] the child each row's sampled token leads to, -1 where none."""
    num_rows = draft.token_ids.shape[0]
    parents = draft.parents
    rows = torch.arange(num_rows, device=parents.device)
    safe_parents = parents.clamp_min(0)
    is_right = (parents >= 0) & (draft.token_ids == sampled.token_ids[safe_parents])
    # Lowest right child per parent; one slot more takes the rows that are no right child.
    target = torch.where(is_right, parents, num_rows)
    first = torch.full((num_rows + 1,), num_rows, dtype=torch.int64, device=parents.device)
    first = first.scatter_reduce(0, target, rows, reduce="amin")[:num_rows]
    return torch.where(first < num_rows, first, -1)


def _max_depth(draft: Draft) -> int:
    """A host-known bound of the emitted tokens per request: rows are parents first."""
    if draft.batch_size == 1:
        return draft.token_ids.shape[0]
    return draft.token_ids.shape[0] - draft.batch_size + 1
