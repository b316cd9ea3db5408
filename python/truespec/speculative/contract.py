"""What a drafter proposes and what the target says of it. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal per request, ragged and flattened: rows of a request are adjacent, parents first.

    Attributes:
        token_ids: [num_rows] int64: per request the root (last committed token), then its drafts.
        parents: [num_rows] int64 row of the parent (a lower row), -1 at a root; a chain is row - 1.
        cu_rows: [bs + 1] int32 first row of each request; every request has its root.
        logprobs: [num_rows] fp32 the drafter's own logprob of each draft (0 at roots).
        confidences: [num_rows] fp32 in (0, 1), conditional acceptance, where the drafter has it.
        logits: [num_rows, V] draft logits behind each draft: rejection mode only.
    """

    token_ids: Tensor
    parents: Tensor
    cu_rows: Tensor
    logprobs: Tensor
    confidences: Tensor | None = None
    logits: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Requests."""
        return self.cu_rows.shape[0] - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens a step emits.

    Attributes:
        token_ids: [bs, D] int64 accepted drafts, then the target's own token; padded with -1.
        row_index: [bs, D] int64 target row that produced each token; padded with -1.
        num_tokens: [bs] int32, 1..D; 0 only where the root's row failed.
        failed: [bs] bool: a NaN or empty row on the emitted path, right after the emitted tokens.
    """

    token_ids: Tensor
    row_index: Tensor
    num_tokens: Tensor
    failed: Tensor
