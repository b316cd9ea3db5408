"""Chains of drafts as a drafter makes them: a fixed number per request, then as many as are kept.

Knows tensors of drafts, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.kernels.draft_chain import Transition
from truespec.kernels.noise import DOMAIN_DRAFT
from truespec.layers.sampler import (
    SamplingRows,
    sample_draft,
    sample_draft_chains,
    sampling_rows,
)
from truespec.speculative.contract import Draft


@dataclass(frozen=True, slots=True)
class ChainDrafts:
    """k drafts for each of n requests.

    Attributes:
        token_ids: [n, k] int64 target ids.
        logprobs: [n, k] fp32 the drafter's own.
        confidences: [n, k] fp32 conditional acceptance, or `None`.
        logits: [n, k, V] fp32 draft logits over the target's vocabulary, rejection mode only.
    """

    token_ids: Tensor
    logprobs: Tensor
    confidences: Tensor | None = None
    logits: Tensor | None = None


class DraftStep(NamedTuple):
    """A draft for each of n requests: ids [n] int64, logprobs [n] fp32, logits [n, V] or `None`."""

    token_ids: Tensor
    logprobs: Tensor
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """Chooses drafts with the noise that verification will use, or with noise of their own.

    Attributes:
        vocab_size: of the target.
        target_ids: [DV] int64 target id of each draft id, `None` where they are the same.
        own_stream: rejection mode: drafts are independent of the target's noise, and their logits
            are kept.
    """

    vocab_size: int
    target_ids: Tensor | None
    own_stream: bool

    def rows(self, chunks: list[ReqChunk]) -> SamplingRows:
        """Parameters of the first draft after each chunk's last known token."""
        first = torch.tensor([chunk.req.num_tokens for chunk in chunks])
        return sampling_rows([chunk.req.params for chunk in chunks], [1] * len(chunks), first)

    def choose(self, logits: Tensor, rows: SamplingRows, step: int = 0) -> DraftStep:
        """A draft per row of [n, DV] fp32 draft logits, `step` positions after those of `rows`."""
        token_ids, logprobs = sample_draft(
            logits,
            temperature=rows.temperature,
            seed=rows.seed,
            position=rows.position + step,
            target_ids=self.target_ids,
            domain=self._domain,
        )
        return DraftStep(token_ids, logprobs, self._over_target(logits))

    def choose_chains(
        self, logits: Tensor, rows: SamplingRows, transition: Transition, previous: Tensor
    ) -> ChainDrafts:
        """k drafts per row of [n, k, DV] fp32 draft logits, each biased by the one before.

        Args:
            logits: contiguous, modified.
            previous: [n] int64 target ids before the first drafts.
        """
        token_ids, logprobs = sample_draft_chains(
            logits,
            previous,
            transition,
            temperature=rows.temperature,
            seed=rows.seed,
            position=rows.position,
            target_ids=self.target_ids,
            domain=self._domain,
        )
        return ChainDrafts(token_ids, logprobs, logits=self._over_target(logits))

    @property
    def _domain(self) -> int:
        return DOMAIN_DRAFT if self.own_stream else 0

    def _over_target(self, logits: Tensor) -> Tensor | None:
        if not self.own_stream:
            return None
        if self.target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return wide.index_copy_(-1, self.target_ids, logits)


def stack_steps(steps: list[DraftStep]) -> ChainDrafts:
    """k steps of n drafts, in order."""
    logits = [step.logits for step in steps if step.logits is not None]
    return ChainDrafts(
        token_ids=torch.stack([step.token_ids for step in steps], dim=1),
        logprobs=torch.stack([step.logprobs for step in steps], dim=1),
        logits=torch.stack(logits, dim=1) if logits else None,
    )


def draft_of_chains(
    batch: Batch, active: list[int], lengths: list[int], drafts: ChainDrafts
) -> Draft:
    """The drafts that are kept, each chain behind its root.

    Args:
        active: which of the batch's sampling chunks have drafts, ascending; n of them.
        lengths: drafts to keep of each of these, 0..k.
        drafts: of these chunks, in order.
    """
    roots = torch.tensor([chunk.req.last_token_id for chunk in batch.chunks if chunk.samples])
    places = torch.tensor(active)
    kept = torch.zeros(len(roots), drafts.token_ids.shape[1] + 1, dtype=torch.bool)
    kept[:, 0] = True
    kept[places, 1:] = torch.arange(kept.shape[1] - 1) < torch.tensor(lengths).unsqueeze(1)
    row_counts = kept.sum(1)
    cu_rows = torch.cat([row_counts.new_zeros(1), row_counts.cumsum(0)])
    parents = torch.arange(int(cu_rows[-1])) - 1
    parents[cu_rows[:-1]] = -1

    def flat(at_roots: Tensor, values: Tensor) -> Tensor:
        table = values.new_zeros(*kept.shape, *values.shape[2:])
        table[:, 0] = at_roots
        table[places, 1:] = values
        return table[kept]

    zero = torch.zeros(())
    confidences, logits = drafts.confidences, drafts.logits
    return Draft(
        token_ids=flat(roots, drafts.token_ids),
        parents=parents,
        cu_rows=cu_rows.to(torch.int32),
        logprobs=flat(zero, drafts.logprobs),
        confidences=None if confidences is None else flat(zero + 1, confidences),
        logits=None if logits is None else flat(zero, logits),
    )
