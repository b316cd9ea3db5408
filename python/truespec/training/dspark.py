"""The DSpark training task: batches of blocks, the loss of arXiv 2607.05147 section 3.3."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import BlockBatch, category_weights, make_batch, sample_anchors
from .cache import FeatureCache
from .config import Batching, DSparkLoss
from .dspark_model import DSparkModel, forward_blocks
from .export import export_dspark
from .head_loss import HeadLoss, Teacher, make_teacher
from .measure import measure_dspark
from .target import Target


class DSparkTask:
    """What the loop trains. A batch is a function of (seed, index): resuming repeats nothing."""

    def __init__(
        self,
        model: DSparkModel,
        target: Target,
        draft_vocab: Tensor,
        train: FeatureCache,
        dev: FeatureCache,
        *,
        batching: Batching,
        loss: DSparkLoss,
    ) -> None:
        self.model, self.target, self.draft_vocab = model, target, draft_vocab
        self.train, self.dev = train, dev
        self.batching, self.loss_config = batching, loss
        self.draft_head = target.head[draft_vocab].to(torch.bfloat16)  # [DV, H]
        self._draw_weights = category_weights(train.categories, batching.category_balance)

    def loss(self, batch_index: int, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Loss of one batch, and its metrics."""
        c = self.loss_config
        only_ce = progress < c.ce_only_fraction
        return dspark_loss(
            self.model,
            self.sample_batch(batch_index),
            embedding=self.target.embedding,
            draft_head=self.draft_head,
            draft_vocab=self.draft_vocab,
            config=c,
            ce=1.0 if only_ce else c.ce,
            overlap=0.0 if only_ce else c.overlap,
        )

    def sample_batch(self, batch_index: int) -> BlockBatch:
        """Different sequences, drawn by category weight, and random anchors in each."""
        rng = np.random.default_rng([self.batching.seed, batch_index])
        size = min(self.batching.num_sequences, len(self.train))
        chosen = rng.choice(len(self.train), size, replace=False, p=self._draw_weights)
        sequences = [self.train[int(i)] for i in chosen]
        anchors = [sample_anchors(s, self.batching.anchors_per_sequence, rng) for s in sequences]
        return make_batch(sequences, anchors, self.model.shape.block_size)

    def measure(self) -> dict[str, float]:
        """Figures on the held-out sequences."""
        return measure_dspark(
            self.model, self.target.embedding, self.draft_head, self.draft_vocab, self.dev
        )

    def export(self, path: Path) -> None:
        """Write the checkpoint as a directory that appears at `path` only when complete."""
        export_dspark(self.model, self.target, self.draft_vocab, path)


def dspark_loss(
    model: DSparkModel,
    batch: BlockBatch,
    *,
    embedding: Tensor,
    draft_head: Tensor,
    draft_vocab: Tensor,
    config: DSparkLoss,
    ce: float,
    overlap: float,
) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean over supervised rows of ce · CE + overlap · L1 + confidence · BCE.

    Rows whose true token is outside the draft vocabulary can never be accepted: they train the
    confidence (towards 0) only. Metrics: `loss`, `tau` = expected accepted length of a block, bonus
    included (1 + Σ_k Π_{i<=k} Σ_v min(p_i, q_i)), `top1` = agreement with the true token in row 0.
    """
    hidden = forward_blocks(model, batch, embedding)
    teacher, teacher_rows = _batch_teacher(batch, draft_head, config.teacher_top_k)
    markov = model.markov_head.markov_w1(batch.previous_ids)
    decay = torch.exp(-torch.arange(model.shape.block_size) / config.decay)
    row_weights = batch.is_label * decay
    reachable = torch.isin(batch.label_ids, draft_vocab)
    total = row_weights.sum()
    head_loss, overlaps, best = HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch stub
        hidden.flatten(0, 2),
        markov.flatten(0, 2),
        model.markov_head.markov_w2.weight,
        draft_head,
        teacher.draft_ids[teacher_rows],
        teacher.probs[teacher_rows],
        (row_weights * reachable / total).flatten(),
        ce,
        overlap,
    )
    expected = (overlaps.view_as(reachable) * reachable).clamp(0, 1)
    confidence = _confidence_loss(model, hidden, markov, expected, row_weights / total)
    loss = head_loss + config.confidence * confidence
    top1 = draft_vocab[best].view_as(reachable)[..., 0] == batch.label_ids[..., 0]
    first = batch.is_label[..., 0]
    prefix = (expected * batch.is_label).cumprod(-1).sum(-1)
    return loss, {
        "loss": float(head_loss.detach()),
        "confidence_loss": float(confidence.detach()),
        "tau": 1.0 + float(prefix[first].mean()),
        "top1": float(top1[first].float().mean()),
    }


def _batch_teacher(batch: BlockBatch, draft_head: Tensor, top_k: int) -> tuple[Teacher, Tensor]:
    """Target distributions at the positions that rows predict, and each row's index into them."""
    # NOTE: the label at position j was produced by the target's hidden of position j - 1.
    flat = batch.label_positions - 1 + _sequence_offsets(batch)
    used, rows = torch.unique(flat, return_inverse=True)
    return make_teacher(batch.last.flatten(0, 1)[used], draft_head, top_k), rows.flatten()


def _sequence_offsets(batch: BlockBatch) -> Tensor:
    return (torch.arange(batch.token_ids.shape[0]) * batch.token_ids.shape[1])[:, None, None]


def _confidence_loss(
    model: DSparkModel, hidden: Tensor, markov: Tensor, expected: Tensor, weights: Tensor
) -> Tensor:
    """BCE against the expected acceptance; trains the confidence head only."""
    features = torch.cat([hidden, markov], dim=-1).detach()
    logits = model.confidence_head.proj(features.float()).squeeze(-1)
    losses = F.binary_cross_entropy_with_logits(logits, expected, reduction="none")
    return (losses * weights).sum()
