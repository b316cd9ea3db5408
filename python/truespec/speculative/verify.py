"""Coupled verification: follow each draft while it equals what the target sampled.

Knows drafts and sampled rows, for chains and trees alike; knows no model, drafter or worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.layers.sampler import SampledRows

from .contract import Draft, Verdict


def verify(draft: Draft, sampled: SampledRows, *, max_rows: int | None = None) -> Verdict:
    """Emit the sampled tokens along the path that the draft got right, and one more.

    From the root: emit the row's sampled token; go on in the child that holds this token (of equal
    siblings the lowest row), or stop. A failed row ends the path before its token.

    Args:
        draft: ragged proposals; `parents` point to lower rows.
        sampled: one choice per row of the draft, in the same order.
        max_rows: most rows of a request, which is D of the verdict. `None` reads it from
            `cu_rows`, which waits for an accelerator.
    """
    num_rows = draft.token_ids.shape[0]
    assert sampled.token_ids.shape == (num_rows,), (
        f"{tuple(sampled.token_ids.shape)} sampled rows for {num_rows} draft rows"
    )
    if max_rows is None:
        max_rows = int(draft.cu_rows.diff().max())
    is_path = _is_path(draft, sampled, max_rows)
    return emit_rows(draft.cu_rows, is_path, sampled.token_ids, sampled.failed, max_rows)


def emit_rows(
    cu_rows: Tensor, is_path: Tensor, token_ids: Tensor, failed: Tensor, max_rows: int
) -> Verdict:
    """Pack the rows of each path. `is_path`, `failed` [num_rows] bool, `token_ids` int64."""
    num_rows = token_ids.shape[0]
    batch_size = cu_rows.shape[0] - 1
    rows = torch.arange(num_rows, device=token_ids.device)
    starts = cu_rows[:-1].to(torch.int64)
    row_to_req = torch.bucketize(rows, starts, right=True) - 1
    emits = is_path & ~failed
    count = emits.cumsum(0)
    before = (count - emits.to(torch.int64))[starts]
    # The last column takes the rows that emit nothing, and is cut off.
    slot = torch.where(emits, count - 1 - before[row_to_req], max_rows)
    shape = (2, batch_size, max_rows + 1)
    packed = torch.full(shape, -1, dtype=torch.int64, device=token_ids.device)
    packed[:, row_to_req, slot] = torch.stack((token_ids, rows))
    emitted_ids, row_index = packed[:, :, :max_rows].contiguous()
    has_failed = torch.zeros(batch_size, dtype=torch.int64, device=token_ids.device)
    has_failed.index_add_(0, row_to_req, (is_path & failed).to(torch.int64))
    return Verdict(
        token_ids=emitted_ids,
        row_index=row_index,
        num_tokens=(row_index >= 0).sum(1).to(torch.int32),
        failed=has_failed > 0,
    )


def _is_path(draft: Draft, sampled: SampledRows, max_rows: int) -> Tensor:
    """[num_rows] whether the sampled tokens lead from the root to a row."""
    num_rows = draft.token_ids.shape[0]
    parents = draft.parents
    rows = torch.arange(num_rows, device=parents.device)
    is_root = parents < 0
    jump = torch.where(is_root, rows, parents)
    # A failed row holds -1 and so leads nowhere.
    is_right = ~is_root & (draft.token_ids == sampled.token_ids[jump])
    # The lowest right child of each row; one slot more takes what is no right child.
    target = torch.where(is_right, parents, num_rows)
    first = torch.full((num_rows + 1,), num_rows, dtype=torch.int64, device=parents.device)
    first.scatter_reduce_(0, target, rows, reduce="amin")
    is_path = is_root | (is_right & (first[jump] == rows))
    # Pointer doubling: after i rounds a row knows its 2^i nearest ancestors.
    for _ in range((max_rows - 1).bit_length()):
        is_path = is_path & is_path[jump]
        jump = jump[jump]
    return is_path
