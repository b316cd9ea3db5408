"""Which rows of a draft lie on the path that the sampled tokens take. Wrapper and torch reference.

Knows token ids and parents of ragged rows; the kernel is `paths_numba.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .rows import use_numba

Paths = tuple[Tensor, Tensor, Tensor, Tensor]


def follow_paths(
    draft_ids: Tensor,
    parents: Tensor,
    cu_rows: Tensor,
    sampled_ids: Tensor,
    failed: Tensor,
    *,
    max_rows: int,
) -> Paths:
    """From each root, go on in the lowest child that holds the row's sampled token.

    Args:
        draft_ids, parents, sampled_ids: [num_rows] int64; parents are lower rows, -1 at roots.
        cu_rows: [bs + 1] int32, every request has rows. failed: [num_rows] bool. All of them are
            contiguous.
        max_rows: D, at least the most rows of a request.

    Returns:
        emitted ids [bs, D] int64 and their rows [bs, D] int64, both padded with -1; their number
        [bs] int32; whether the path met a failed row [bs] bool, which emits nothing and ends it.
    """
    if use_numba(draft_ids.device):
        batch_size = cu_rows.shape[0] - 1
        out = (
            np.empty((batch_size, max_rows), np.int64),
            np.empty((batch_size, max_rows), np.int64),
            np.empty(batch_size, np.int32),
            np.empty(batch_size, np.bool_),
        )
        args = (draft_ids, parents, cu_rows, sampled_ids, failed)
        _kernel()(*[tensor.numpy() for tensor in args], out)
        ids, rows, counts, has_failed = map(torch.from_numpy, out)
        return ids, rows, counts, has_failed
    is_path = _is_path(draft_ids, parents, sampled_ids, max_rows)
    return pack_paths(cu_rows, is_path, sampled_ids, failed, max_rows)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    from .paths_numba import walk

    return walk


def pack_paths(
    cu_rows: Tensor, is_path: Tensor, token_ids: Tensor, failed: Tensor, max_rows: int
) -> Paths:
    """Pack the rows of each path. `is_path`, `failed` [num_rows] bool, `token_ids` int64.

    The result is that of `follow_paths`.
    """
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
    num_tokens = (row_index >= 0).sum(1).to(torch.int32)
    return emitted_ids, row_index, num_tokens, has_failed > 0


def _is_path(draft_ids: Tensor, parents: Tensor, sampled_ids: Tensor, max_rows: int) -> Tensor:
    """[num_rows] whether the sampled tokens lead from the root to a row."""
    num_rows = draft_ids.shape[0]
    rows = torch.arange(num_rows, device=parents.device)
    is_root = parents < 0
    jump = torch.where(is_root, rows, parents)
    # A failed row holds -1 and so leads nowhere.
    is_right = ~is_root & (draft_ids == sampled_ids[jump])
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
