"""DFlash: a block pass whose rows draft independently of each other."""

from __future__ import annotations

from pathlib import Path

from truespec.config import EngineConfig
from truespec.layers.sampler import SamplingRows
from truespec.models.drafters.block import BlockDrafter
from truespec.models.llama import CausalLM
from truespec.speculative.block_worker import Blocks, BlockWorker
from truespec.speculative.chains import ChainDrafts, stack_steps


class DFlashWorker(BlockWorker):
    """Every draft is chosen from its own block row; there are no sequential heads."""

    @classmethod
    def load(cls, config: EngineConfig, target: CausalLM, path: Path) -> BlockDrafter:
        drafter = super().load(config, target, path)
        if drafter.markov is not None:
            raise ValueError(f"the drafter {path.name} has a Markov head: run it as DSPARK")
        return drafter

    def draft_blocks(self, blocks: Blocks, rows: SamplingRows) -> ChainDrafts:
        _, logits = self.run(blocks)
        return stack_steps(
            [self.sampler.choose(logits[:, step], rows, step) for step in range(logits.shape[1])]
        )
