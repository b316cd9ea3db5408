"""The DSpark training task: the loss of arXiv 2607.05147 section 3.3."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_task import BlockTask, LogitsLoss, logits_loss
from .cache import FeatureCache
from .config import Batching, DSparkLoss
from .dspark_model import DSparkModel, forward_blocks
from .target import Target


class DSparkTask(BlockTask[DSparkModel]):
    """What the loop trains."""

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
        super().__init__(model, target, draft_vocab, train, dev, batching=batching)
        self.loss_config = loss

    def loss(self, batch_index: int, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Weighted mean over supervised rows of ce · CE + overlap · L1 + confidence · BCE.

        Rows whose true token is outside the draft vocabulary train the confidence, towards 0.
        """
        batch = self.sample_batch(batch_index)
        hidden = forward_blocks(self.model, batch, self.embedding)
        drafts = logits_loss(
            self.model,
            batch,
            hidden,
            draft_head=self.draft_head,
            draft_vocab=self.draft_vocab,
            config=self.loss_config,
            progress=progress,
        )
        markov = self.model.markov_rows(batch.previous_ids)
        confidence = _confidence_loss(self.model, hidden, markov, drafts)
        metrics = drafts.metrics | {"confidence_loss": float(confidence.detach())}
        return drafts.loss + self.loss_config.confidence * confidence, metrics


def _confidence_loss(
    model: DSparkModel, hidden: Tensor, markov: Tensor, drafts: LogitsLoss
) -> Tensor:
    """BCE against the expected acceptance; trains the confidence head only."""
    features = torch.cat([hidden, markov], dim=-1).detach()
    logits = model.confidence_head.proj(features.float()).squeeze(-1)
    losses = F.binary_cross_entropy_with_logits(logits, drafts.expected, reduction="none")
    return (losses * drafts.weights).sum()
