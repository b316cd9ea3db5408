"""DSpark: a block pass, then a short sequential head that sees its own choices.

arXiv 2607.05147. Drafts are chosen with the noise the target will use at the same position, which
is what keeps acceptance high at T > 0.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from truespec.config import EngineConfig
from truespec.layers.sampler import SamplingRows
from truespec.models.drafters.block import BlockDrafter, load_block_drafter
from truespec.models.drafters.heads import ConfidenceHead, VanillaMarkov
from truespec.models.llama import CausalLM
from truespec.speculative.block_worker import Blocks, BlockWorker
from truespec.speculative.chains import ChainDrafts, stack_steps
from truespec.speculative.drafter_worker import Drafting, draft_weight_type


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

    def draft_blocks(self, blocks: Blocks, rows: SamplingRows) -> ChainDrafts:
        markov = self.drafter.markov
        if isinstance(markov, VanillaMarkov) and markov.transition is not None:
            sure = None if self._confidence is None else self._confidence.in_chain
            rule = self.sampler.chain_rule(rows, markov.transition, blocks.anchors, sure)
            chains = self.drafter.run_chains(
                blocks.rows, self.draft_kv, blocks.context, rule, blocks.num_steps
            )
            return self.sampler.drafts_of(chains)
        hidden, logits = self.run(blocks)
        return self._choose_in_turn(logits, hidden, blocks.anchors, rows)

    @property
    def _confidence(self) -> ConfidenceHead | None:
        """The head, where a threshold asks for it: what is verified follows from other things."""
        return self.drafter.confidence if self._threshold > 0 else None

    @property
    def _threshold(self) -> float:
        return self.config.speculative_dspark_confidence_threshold

    def _choose_in_turn(
        self, base: Tensor, hidden: Tensor, anchors: Tensor, rows: SamplingRows
    ) -> ChainDrafts:
        """Step by step, whatever the kind of transition; `base` [n, k, DV] are its logits."""
        markov, confidence = self.drafter.markov, self._confidence
        state = markov.initial_state(len(anchors)) if markov is not None else None
        previous, steps, embedded = anchors, [], []
        for step in range(hidden.shape[1]):
            logits = base[:, step]
            if markov is not None:
                embedded.append(markov.embed(previous))
                bias, state = markov.bias(embedded[-1], hidden[:, step], state)
                logits = logits + bias
            steps.append(self.sampler.choose(logits, rows, step))
            previous = steps[-1].token_ids
        drafts = stack_steps(steps)
        if confidence is None:
            return drafts
        seen = torch.stack(embedded, dim=1) if embedded else None
        return replace(drafts, confidences=confidence(hidden, seen).tolist())

    def lengths(self, drafting: Drafting, drafts: ChainDrafts) -> list[int]:
        """Also cut each block at the first confidence below the threshold.

        A draft's confidence does not depend on its own token, so this is lawful in every mode.
        """
        if drafts.confidences is not None:
            made = zip(drafts.confidences, drafting.counts, strict=True)
            counts = [_num_sure(values[:count], self._threshold) for values, count in made]
            drafting = drafting._replace(counts=counts)
        return super().lengths(drafting, drafts)


def _num_sure(confidences: list[float], threshold: float) -> int:
    """Drafts before the first that is not sure enough."""
    return sum(1 for _ in takewhile(lambda value: value >= threshold, confidences))
