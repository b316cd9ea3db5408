"""DSpark: a block pass, then a short sequential head that sees its own choices.

arXiv 2607.05147. Drafts are chosen with the noise the target will use at the same position, which
is what keeps acceptance high at T > 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.batch import ReqChunk
from truespec.layers.sampler import sample_draft, sampling_rows
from truespec.speculative.block_worker import BlockChoice, BlockWorker


class DSparkWorker(BlockWorker):
    """Row i of the block drafts the token after its position; each step sees the one before."""

    def choose(self, hidden: Tensor, anchors: Tensor, chunks: list[ReqChunk]) -> BlockChoice:
        drafter = self.drafter
        num_blocks = len(chunks)
        first = torch.tensor([chunk.start + 1 for chunk in chunks])
        values = sampling_rows([c.req.params for c in chunks], [1] * num_blocks, first)
        base = drafter.head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        markov = drafter.markov
        state = markov.initial_state(num_blocks) if markov is not None else None
        previous, ids, logprobs, confidences = anchors, [], [], []
        for step in range(self.num_drafts):
            row, logits, embedded = hidden[:, step], base[:, step], None
            if markov is not None:
                embedded = markov.embed(previous)
                bias, state = markov.bias(embedded, row, state)
                logits = logits + bias
            if drafter.confidence is not None:
                confidences.append(drafter.confidence(row, embedded, step))
            previous, logprob = sample_draft(
                logits,
                temperature=values.temperature,
                seed=values.seed,
                position=values.position + step,
                target_ids=drafter.target_ids,
            )
            ids.append(previous)
            logprobs.append(logprob)
        return BlockChoice(
            torch.stack(ids, dim=1),
            torch.stack(logprobs, dim=1),
            torch.stack(confidences, dim=1) if confidences else None,
        )
