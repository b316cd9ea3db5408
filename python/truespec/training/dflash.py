"""The DFlash training task: DSpark's backbone and row rule, every draft chosen from its own row.

The row rule is DeepSpec's (`dflash_*_block7`): row i predicts the token at anchor + 1 + i, so no
row is wasted on the anchor, and a DSpark backbone can be taken over as it is.
"""

from torch import Tensor

from .block_task import BlockTask, logits_loss
from .cache import FeatureCache
from .config import Batching, DFlashLoss
from .dspark_model import BlockModel, forward_blocks
from .target import Target


class DFlashTask(BlockTask[BlockModel]):
    """What the loop trains."""

    def __init__(
        self,
        model: BlockModel,
        target: Target,
        draft_vocab: Tensor,
        train: FeatureCache,
        dev: FeatureCache,
        *,
        batching: Batching,
        loss: DFlashLoss,
    ) -> None:
        super().__init__(model, target, draft_vocab, train, dev, batching=batching)
        self.loss_config = loss

    def loss(self, batch_index: int, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Weighted mean over supervised rows of ce · CE + overlap · L1, and metrics."""
        batch = self.sample_batch(batch_index)
        drafts = logits_loss(
            self.model,
            batch,
            forward_blocks(self.model, batch, self.embedding),
            draft_head=self.draft_head,
            draft_vocab=self.draft_vocab,
            config=self.loss_config,
            progress=progress,
        )
        return drafts.loss, drafts.metrics
