"""Coupled verification: follow each draft while it equals what the target sampled.

Knows drafts and sampled rows, for chains and trees alike; knows no model, drafter or worker.
"""

from __future__ import annotations

from itertools import pairwise

from truespec.kernels.paths import follow_paths
from truespec.layers.sampler import SampledRows

from .contract import Draft, Verdict


def verify(draft: Draft, sampled: SampledRows, *, max_rows: int | None = None) -> Verdict:
    """Emit the sampled tokens along the path that the draft got right, and one more.

    From the root: emit the row's sampled token; go on in the child that holds this token (of equal
    siblings the lowest row), or stop. A failed row ends the path before its token.

    Args:
        draft: ragged proposals; `parents` point to lower rows.
        sampled: one choice per row of the draft, in the same order.
        max_rows: D of the verdict, at least the most rows of a request. `None` reads the latter
            from `cu_rows`, which waits for an accelerator.
    """
    num_rows = draft.token_ids.shape[0]
    assert sampled.token_ids.shape == (num_rows,), (
        f"{tuple(sampled.token_ids.shape)} sampled rows for {num_rows} draft rows"
    )
    if max_rows is None:
        ranges = pairwise(draft.cu_rows.tolist())
        max_rows = max((end - begin for begin, end in ranges), default=1)
    return Verdict(
        *follow_paths(
            draft.token_ids,
            draft.parents,
            draft.cu_rows,
            sampled.token_ids,
            sampled.failed,
            max_rows=max_rows,
        )
    )
