"""Choosing blocks: which anchors of which sequences, their labels and their weights.

Row i of the block anchored at t predicts token t + 1 + i from the target's features of tokens < t
and the ids of token t only (DSpark, arXiv 2607.05147, section 3.3).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cache import FeatureSequence


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """B sequences padded to S tokens, A blocks each, G rows per block."""

    token_ids: Tensor  # [B, S] int64, 0 past the end
    taps: Tensor  # [B, S, m, H] bf16, 0 past the end
    last: Tensor  # [B, S, H] bf16, 0 past the end
    anchors: Tensor  # [B, A] int64 position of token x_0 of each block
    is_label: Tensor  # [B, A, G] bool: row has a label (inside the answer, block not padding)

    @property
    def label_positions(self) -> Tensor:
        """[B, A, G] int64 position of the token each row predicts, clipped to S - 1."""
        ahead = torch.arange(self.is_label.shape[-1], device=self.anchors.device)
        rows = self.anchors.unsqueeze(-1) + 1 + ahead
        return rows.clamp(max=self.token_ids.shape[1] - 1)

    @property
    def label_ids(self) -> Tensor:
        return self._take(self.label_positions)  # [B, A, G] int64

    @property
    def previous_ids(self) -> Tensor:
        """[B, A, G] int64 token before each label: the true input of the Markov head."""
        return self._take(self.label_positions - 1)

    def to(self, device: torch.device) -> "BlockBatch":
        """The same batch on a device."""
        parts = (self.token_ids, self.taps, self.last, self.anchors, self.is_label)
        return BlockBatch(*(part.to(device) for part in parts))

    def _take(self, positions: Tensor) -> Tensor:
        return self.token_ids.gather(1, positions.flatten(1)).view_as(positions)


def all_anchors(sequence: FeatureSequence) -> np.ndarray:
    """Positions t such that tokens t and t + 1 belong to the answer; [n] int64, may be empty."""
    return np.arange(sequence.answer_start, sequence.num_tokens - 1)


def make_batch(
    sequences: Seq[FeatureSequence], anchors: Seq[np.ndarray], block_size: int
) -> BlockBatch:
    """Pad sequences and their chosen anchors; missing anchors become rows without labels."""
    width = max(s.num_tokens for s in sequences)
    lens = torch.tensor([s.num_tokens for s in sequences])
    padded = torch.full((len(sequences), max(map(len, anchors))), -1, dtype=torch.int64)
    for row, chosen in zip(padded, anchors, strict=True):
        row[: len(chosen)] = torch.from_numpy(chosen)
    labels = padded.unsqueeze(-1) + 1 + torch.arange(block_size)
    is_label = (padded >= 0).unsqueeze(-1) & (labels < lens[:, None, None])
    # NOTE: a padding block gets anchor 0: it sees its own rows only and carries no label.
    return BlockBatch(
        _pad([s.token_ids.long() for s in sequences], width),
        _pad([s.taps for s in sequences], width),
        _pad([s.last for s in sequences], width),
        padded.clamp(min=0),
        is_label,
    )


def sample_anchors(sequence: FeatureSequence, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `count` different anchors of a sequence, in random order."""
    return rng.permutation(all_anchors(sequence))[:count]


def category_weights(categories: Seq[str], balance: float) -> np.ndarray:
    """Probability of drawing each sequence; [n] float64.

    balance 0 draws sequences uniformly, 1 draws every category equally often.
    """
    _, index, counts = np.unique(categories, return_inverse=True, return_counts=True)
    weights: np.ndarray = counts[index] ** -balance
    return np.asarray(weights / weights.sum())


def _pad(rows: list[Tensor], width: int) -> Tensor:
    out = rows[0].new_zeros((len(rows), width, *rows[0].shape[1:]))
    for target, row in zip(out, rows, strict=True):
        target[: row.shape[0]] = row
    return out
