"""The walk along a draft in numba: one request after the other, row by row."""

from __future__ import annotations

from .jit import kernel


@kernel
def walk(draft_ids, parents, cu_rows, sampled_ids, failed, out):  # type: ignore[no-untyped-def]
    """See `paths.follow_paths`. `out`: ids and rows [bs, D], counts, has failed."""
    ids, rows, num_tokens, has_failed = out
    ids[:] = -1
    rows[:] = -1
    for i in range(cu_rows.shape[0] - 1):
        row = cu_rows[i]
        end = cu_rows[i + 1]
        count = 0
        has_failed[i] = False
        while row < end:
            if failed[row]:
                has_failed[i] = True
                break
            assert count < ids.shape[1], "max_rows is less than the rows of a path"
            token = sampled_ids[row]
            ids[i, count] = token
            rows[i, count] = row
            count += 1
            child = row + 1  # parents come first, and the lowest right child wins
            while child < end and (parents[child] != row or draft_ids[child] != token):
                child += 1
            row = child
        num_tokens[i] = count
