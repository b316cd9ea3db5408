"""Choosing chains of drafts: where they start, how far they go, what they read and predict.

Draft step j of the chain that starts at row i reads token i + 1 + j and predicts token i + 2 + j;
step 0 reads the target's features of row i. Sequences are packed one after the other, unpadded.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .blocks import all_anchors
from .cache import FeatureSequence


class Steps(NamedTuple):
    """The drafts of a batch, step after step: M in all."""

    chains: Tensor  # [M] int64 index of each draft's chain
    counts: list[int]  # drafts of each step
    label_rows: Tensor  # [M] int64 packed row of the token to predict, clipped to N - 1
    is_label: Tensor  # [M] bool: that token is one of the chain's own sequence


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """n sequences of N tokens together, with R chains."""

    token_ids: Tensor  # [N] int64
    taps: Tensor  # [N, m, H] bf16
    last: Tensor  # [N, H] bf16
    lens: Tensor  # [n] int64 tokens of each sequence
    rows: Tensor  # [R] int64 packed row each chain starts at, grouped by sequence
    sequences: Tensor  # [R] int64 index of each chain's sequence, ascending
    depths: Tensor  # [R] int64 draft steps of each chain, at least 1

    @property
    def positions(self) -> Tensor:
        """[N] int64 position of each token in its own sequence."""
        firsts = self.lens.cumsum(0) - self.lens
        places = torch.arange(len(self.token_ids), device=firsts.device)
        return places - firsts.repeat_interleave(self.lens)

    def to(self, device: torch.device) -> "ChainBatch":
        """The same batch on a device."""
        return ChainBatch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def tokens_after(self, rows: Tensor, ahead: int) -> Tensor:
        """Tokens `ahead` places after packed rows; any token past the sequence's end."""
        return self.token_ids[(rows + ahead).clamp(max=len(self.token_ids) - 1)]

    def alive(self, step: int) -> Tensor:
        """[.] int64 chains that take this step, ascending."""
        return (self.depths > step).nonzero().squeeze(1)

    def steps(self, num_steps: int) -> Steps:
        """All drafts up to a depth."""
        alive = [self.alive(step) for step in range(num_steps)]
        wanted = torch.cat([self.rows[own] + 2 + step for step, own in enumerate(alive)])
        chains = torch.cat(alive)
        is_label = wanted < self.lens.cumsum(0)[self.sequences[chains]]
        rows = wanted.clamp(max=len(self.token_ids) - 1)
        return Steps(chains, [len(own) for own in alive], rows, is_label)


def chain_rows(sequence: FeatureSequence) -> np.ndarray:
    """Rows at which chains start: those before anchors; [n] int64, may be empty."""
    return all_anchors(sequence) - 1


def pack_chains(
    sequences: Seq[FeatureSequence], rows: Seq[np.ndarray], depths: np.ndarray | None = None
) -> ChainBatch:
    """Pack sequences with the rows chosen in each (positions in the sequence).

    depths: of all chains in order; without them every chain goes as far as a drafter can.
    """
    lens = np.array([s.num_tokens for s in sequences])
    counts = [len(own) for own in rows]
    packed = np.concatenate(rows) + np.repeat(np.cumsum(lens) - lens, counts)
    far = np.full(len(packed), np.iinfo(np.int64).max)
    return ChainBatch(
        torch.cat([s.token_ids for s in sequences]).long(),
        torch.cat([s.taps for s in sequences]),
        torch.cat([s.last for s in sequences]),
        torch.from_numpy(lens),
        torch.from_numpy(packed),
        torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        torch.from_numpy(far if depths is None else depths),
    )
