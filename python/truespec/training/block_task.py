"""What training DSpark and DFlash drafters has in common: batches, loss of the draft logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from .blocks import BlockBatch, category_weights, make_batch, sample_anchors
from .cache import FeatureCache
from .config import Batching, DFlashLoss, DSparkLoss
from .dspark_model import BlockModel
from .export import export_block
from .head_loss import HeadLoss, Teacher, make_teacher
from .measure import measure_blocks
from .target import Target

Model = TypeVar("Model", bound=BlockModel)


class BlockTask(Generic[Model]):
    """A batch is a function of (seed, index): resuming repeats nothing."""

    def __init__(
        self,
        model: Model,
        target: Target,
        draft_vocab: Tensor,
        train: FeatureCache,
        dev: FeatureCache,
        *,
        batching: Batching,
    ) -> None:
        self.model, self.target, self.draft_vocab = model, target, draft_vocab
        self.train, self.dev = train, dev
        self.batching = batching
        self.device = torch.device("cpu")
        self.embedding = target.embedding
        self.draft_head = target.head[draft_vocab].to(torch.bfloat16)  # [DV, H]
        self._draw_weights = category_weights(train.categories, batching.category_balance)

    def to(self, device: torch.device) -> None:
        """Compute on a device from now on."""
        self.device = device
        self.model.to(device)
        self.embedding, self.draft_head = self.embedding.to(device), self.draft_head.to(device)
        self.draft_vocab = self.draft_vocab.to(device)

    def sample_batch(self, batch_index: int) -> BlockBatch:
        """Different sequences, drawn by category weight, and random anchors in each."""
        rng = np.random.default_rng([self.batching.seed, batch_index])
        size = min(self.batching.num_sequences, len(self.train))
        chosen = rng.choice(len(self.train), size, replace=False, p=self._draw_weights)
        sequences = [self.train[int(i)] for i in chosen]
        anchors = [sample_anchors(s, self.batching.anchors_per_sequence, rng) for s in sequences]
        return make_batch(sequences, anchors, self.model.shape.block_size).to(self.device)

    def measure(self) -> dict[str, float]:
        """Figures on the held-out sequences."""
        return measure_blocks(
            self.model, self.embedding, self.draft_head, self.draft_vocab, self.dev
        )

    def export(self, path: Path) -> None:
        """Write the checkpoint as a directory that appears at `path` only when complete."""
        export_block(self.model, self.target, self.draft_vocab, path)


@dataclass(frozen=True, slots=True)
class LogitsLoss:
    """Loss of the draft logits of a batch."""

    loss: Tensor  # []
    weights: Tensor  # [B, A, G] fp32, their sum 1: 0 on rows without a label
    expected: Tensor  # [B, A, G] fp32 Σ_v min(p, q): how likely each draft is accepted
    metrics: dict[str, float]


def logits_loss(
    model: BlockModel,
    batch: BlockBatch,
    hidden: Tensor,
    *,
    draft_head: Tensor,
    draft_vocab: Tensor,
    config: DSparkLoss | DFlashLoss,
    progress: float,
) -> LogitsLoss:
    """Weighted mean over supervised rows of ce · CE + overlap · L1; CE alone at the start.

    Rows whose true token is outside the draft vocabulary can never be accepted and have no part in
    the loss. Metrics: `loss`, `tau` = expected accepted length of a block, bonus included
    (1 + Σ_k Π_{i<=k} Σ_v min(p_i, q_i)), `top1` = agreement with the true token in row 0.
    """
    only_ce = progress < config.ce_only_fraction
    teacher, teacher_rows = batch_teacher(batch, draft_head, config.teacher_top_k)
    places = torch.arange(model.shape.block_size, device=hidden.device)
    weights = batch.is_label * torch.exp(-places / config.decay)
    weights = weights / weights.sum()
    reachable = torch.isin(batch.label_ids, draft_vocab)
    loss, overlaps, best = HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch stub
        hidden.flatten(0, 2),
        model.markov_rows(batch.previous_ids).flatten(0, 2),
        model.markov_weight(),
        draft_head,
        teacher.draft_ids[teacher_rows],
        teacher.probs[teacher_rows],
        (weights * reachable).flatten(),
        1.0 if only_ce else config.ce,
        0.0 if only_ce else config.overlap,
    )
    expected = (overlaps.view_as(reachable) * reachable).clamp(0, 1)
    first = batch.is_label[..., 0]
    top1 = draft_vocab[best].view_as(reachable)[..., 0] == batch.label_ids[..., 0]
    prefix = (expected * batch.is_label).cumprod(-1).sum(-1)
    metrics = {
        "loss": float(loss.detach()),
        "tau": 1.0 + float(prefix[first].mean()),
        "top1": float(top1[first].float().mean()),
    }
    return LogitsLoss(loss, weights, expected, metrics)


def batch_teacher(batch: BlockBatch, draft_head: Tensor, top_k: int) -> tuple[Teacher, Tensor]:
    """Target distributions at the positions that rows predict, and each row's index into them."""
    # NOTE: the label at position j was produced by the target's hidden of position j - 1.
    num_sequences, width = batch.token_ids.shape
    firsts = torch.arange(num_sequences, device=batch.anchors.device)[:, None, None] * width
    used, rows = torch.unique(batch.label_positions - 1 + firsts, return_inverse=True)
    return make_teacher(batch.last.flatten(0, 1)[used], draft_head, top_k), rows.flatten()
