"""Choosing chains of drafts: where they start, which tokens they read and which they predict.

Draft step j of the chain that starts at row i reads token i + 1 + j and predicts token i + 2 + j;
step 0 reads the target's features of row i. Sequences are packed one after the other, unpadded.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .blocks import all_anchors
from .cache import FeatureSequence


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """n sequences of N tokens together, with R chains."""

    token_ids: Tensor  # [N] int64
    taps: Tensor  # [N, m, H] bf16
    last: Tensor  # [N, H] bf16
    lens: list[int]  # tokens of each sequence
    rows: Tensor  # [R] int64 packed row each chain starts at, grouped by sequence
    counts: list[int]  # chains of each sequence

    @property
    def positions(self) -> Tensor:
        """[N] int64 position of each token in its own sequence."""
        return torch.cat([torch.arange(n) for n in self.lens])

    def tokens_after(self, rows: Tensor, ahead: int) -> Tensor:
        """Tokens `ahead` places after packed rows; any token past the sequence's end."""
        return self.token_ids[(rows + ahead).clamp(max=len(self.token_ids) - 1)]

    def labels(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Packed row of the token that every step predicts, [K, R] int64 clipped to N - 1, and
        whether it belongs to the chain's own sequence, [K, R] bool."""
        wanted = self.rows + 2 + torch.arange(num_steps).unsqueeze(1)
        ends = torch.tensor(self.lens).cumsum(0).repeat_interleave(torch.tensor(self.counts))
        return wanted.clamp(max=len(self.token_ids) - 1), wanted < ends


def chain_rows(sequence: FeatureSequence) -> np.ndarray:
    """Rows at which chains start: those before anchors; [n] int64, may be empty."""
    return all_anchors(sequence) - 1


def pack_chains(sequences: Seq[FeatureSequence], rows: Seq[np.ndarray]) -> ChainBatch:
    """Pack sequences with the rows chosen in each (positions in the sequence)."""
    lens = [s.num_tokens for s in sequences]
    offsets = np.cumsum([0, *lens[:-1]])
    packed = np.concatenate([own + first for own, first in zip(rows, offsets, strict=True)])
    return ChainBatch(
        torch.cat([s.token_ids for s in sequences]).long(),
        torch.cat([s.taps for s in sequences]),
        torch.cat([s.last for s in sequences]),
        lens,
        torch.from_numpy(packed),
        [len(own) for own in rows],
    )
