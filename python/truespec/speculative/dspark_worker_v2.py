"""DSpark: a block pass, then a short sequential head that sees its own choices.

arXiv 2607.05147. Drafts are chosen with the noise the target will use at the same position, which
is what keeps acceptance high at T > 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from truespec.config import EngineConfig
from truespec.layers.sampler import SamplingRows
from truespec.models.drafters.block import BlockDrafter, load_block_drafter
from truespec.models.drafters.heads import VanillaMarkov
from truespec.models.llama import CausalLM
from truespec.speculative.block_worker import BlockWorker
from truespec.speculative.chains import ChainDrafts, stack_steps
from truespec.speculative.drafter_worker import draft_weight_type


class DSparkWorker(BlockWorker):
    """Each draft's logits depend on the draft before it, and so does the confidence in it."""

    options = BlockWorker.options | {
        "speculative_dspark_block_size",
        "speculative_dspark_confidence_threshold",
    }

    @classmethod
    def load(cls, config: EngineConfig, target: CausalLM, path: Path) -> BlockDrafter:
        block_size = config.speculative_dspark_block_size
        drafter = load_block_drafter(path, target, block_size, draft_weight_type(config, target))
        threshold = config.speculative_dspark_confidence_threshold
        if not 0 <= threshold < 1:
            raise ValueError(
                f"--speculative-dspark-confidence-threshold is {threshold}, expected 0 to below 1"
            )
        if threshold and drafter.confidence is None:
            raise ValueError(
                f"--speculative-dspark-confidence-threshold is {threshold}, "
                f"but the drafter {path.name} has no confidence head"
            )
        return drafter

    def choose(self, hidden: Tensor, anchors: Tensor, rows: SamplingRows) -> ChainDrafts:
        markov = self.drafter.markov
        base = self.drafter.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        if isinstance(markov, VanillaMarkov) and markov.transition is not None:
            drafts = self.sampler.choose_chains(base, rows, markov.transition, anchors)
        else:
            drafts = self._choose_in_turn(base, hidden, anchors, rows)
        previous = torch.cat([anchors.unsqueeze(1), drafts.token_ids[:, :-1]], dim=1)
        return replace(drafts, confidences=self._confidences(hidden, previous))

    def _choose_in_turn(
        self, base: Tensor, hidden: Tensor, anchors: Tensor, rows: SamplingRows
    ) -> ChainDrafts:
        """Step by step, whatever the kind of transition; `base` [n, k, DV] are its logits."""
        markov = self.drafter.markov
        state = markov.initial_state(len(anchors)) if markov is not None else None
        previous, steps = anchors, []
        for step in range(hidden.shape[1]):
            logits = base[:, step]
            if markov is not None:
                bias, state = markov.bias(markov.embed(previous), hidden[:, step], state)
                logits = logits + bias
            steps.append(self.sampler.choose(logits, rows, step))
            previous = steps[-1].token_ids
        return stack_steps(steps)

    def _confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """[n, k], of drafts behind `previous` [n, k] target ids."""
        if self.drafter.confidence is None:
            return None
        markov = self.drafter.markov
        return self.drafter.confidence(hidden, None if markov is None else markov.embed(previous))

    def lengths(self, counts: list[int], drafts: ChainDrafts, other_rows: int) -> list[int]:
        """Also cut each block at the first confidence below the threshold.

        A draft's confidence does not depend on its own token, so this is lawful in every mode.
        """
        if drafts.confidences is not None:
            sure = drafts.confidences >= self.config.speculative_dspark_confidence_threshold
            prefixes = sure.to(torch.int64).cumprod(1).sum(1).tolist()
            counts = [min(count, prefix) for count, prefix in zip(counts, prefixes, strict=True)]
        return super().lengths(counts, drafts, other_rows)
