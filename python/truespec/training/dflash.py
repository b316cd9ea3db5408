"""The DFlash training task: DSpark's backbone and row rule, every draft chosen from its own row.

The row rule is DeepSpec's (`dflash_*_block7`): row i predicts the token at anchor + 1 + i, so no
row is wasted on the anchor, and a DSpark backbone can be taken over as it is.
"""

from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from .blocks import BlockBatch
from .cache import FeatureCache
from .config import Batching, DFlashLoss, DFlashShape, DSparkLoss, DSparkShape
from .dspark import DSparkTask, _batch_teacher
from .dspark_model import Dims, DSparkModel, forward_blocks
from .head_loss import HeadLoss
from .target import Target


class DFlashModel(DSparkModel):
    """DSpark's backbone without sequential heads; parameter names are those of the checkpoint."""

    def __init__(self, shape: DFlashShape, dims: Dims) -> None:
        super().__init__(DSparkShape(**asdict(shape), markov_rank=1), dims)
        self.shape = replace(self.shape, markov_rank=0)
        self.markov_head = _NoMarkovHead(shape.draft_vocab_size)  # type: ignore[assignment]
        del self.confidence_head


class DFlashTask(DSparkTask):
    """What the loop trains. A batch is a function of (seed, index): resuming repeats nothing."""

    def __init__(
        self,
        model: DFlashModel,
        target: Target,
        draft_vocab: Tensor,
        train: FeatureCache,
        dev: FeatureCache,
        *,
        batching: Batching,
        loss: DFlashLoss,
    ) -> None:
        super().__init__(
            model, target, draft_vocab, train, dev, batching=batching, loss=DSparkLoss()
        )
        self.dflash_config = loss

    def loss(self, batch_index: int, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Loss of one batch, and its metrics."""
        c = self.dflash_config
        only_ce = progress < c.ce_only_fraction
        return dflash_loss(
            self.model,
            self.sample_batch(batch_index),
            embedding=self.target.embedding,
            draft_head=self.draft_head,
            draft_vocab=self.draft_vocab,
            config=c,
            ce=1.0 if only_ce else c.ce,
            overlap=0.0 if only_ce else c.overlap,
        )


def dflash_loss(
    model: DSparkModel,
    batch: BlockBatch,
    *,
    embedding: Tensor,
    draft_head: Tensor,
    draft_vocab: Tensor,
    config: DFlashLoss,
    ce: float,
    overlap: float,
) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean over supervised rows of ce · CE + overlap · L1; metrics are DSpark's."""
    hidden = forward_blocks(model, batch, embedding)
    teacher, teacher_rows = _batch_teacher(batch, draft_head, config.teacher_top_k)
    row_weights = batch.is_label * torch.exp(-torch.arange(model.shape.block_size) / config.decay)
    reachable = torch.isin(batch.label_ids, draft_vocab)
    loss, overlaps, best = HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch stub
        hidden.flatten(0, 2),
        model.markov_head.markov_w1(batch.previous_ids).flatten(0, 2),
        model.markov_head.markov_w2.weight,
        draft_head,
        teacher.draft_ids[teacher_rows],
        teacher.probs[teacher_rows],
        (row_weights * reachable / row_weights.sum()).flatten(),
        ce,
        overlap,
    )
    expected = (overlaps.view_as(reachable) * reachable).clamp(0, 1)
    first = batch.is_label[..., 0]
    top1 = draft_vocab[best].view_as(reachable)[..., 0] == batch.label_ids[..., 0]
    prefix = (expected * batch.is_label).cumprod(-1).sum(-1)
    return loss, {
        "loss": float(loss.detach()),
        "tau": 1.0 + float(prefix[first].mean()),
        "top1": float(top1[first].float().mean()),
    }


class _NoMarkovHead(nn.Module):
    """A Markov head of rank 0."""

    def __init__(self, draft_vocab: int) -> None:
        super().__init__()
        self.markov_w2 = nn.Module()
        self.markov_w2.register_buffer("weight", torch.zeros(draft_vocab, 0), persistent=False)

    def markov_w1(self, previous: Tensor) -> Tensor:
        return torch.zeros(*previous.shape, 0)
