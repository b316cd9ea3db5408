"""Chains of drafts as a drafter makes them: a fixed number per request, then as many as are kept.

Knows tensors of drafts, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from truespec.speculative.base import chain_draft
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
    ids: list[list[int]] = [[] for chunk in batch.chunks if chunk.samples]
    logprobs: list[list[float]] = [[] for _ in ids]
    made = zip(drafts.token_ids.tolist(), drafts.logprobs.tolist(), strict=True)
    for place, length, (own, values) in zip(active, lengths, made, strict=True):
        ids[place], logprobs[place] = own[:length], values[:length]
    draft = chain_draft(batch, ids, logprobs)
    if drafts.confidences is None and drafts.logits is None:
        return draft
    kept = [(i, j, place) for i, place in enumerate(active) for j in range(lengths[i])]
    blocks, steps, places = torch.tensor(kept, dtype=torch.int64).view(-1, 3).unbind(1)
    rows = draft.cu_rows[places] + 1 + steps

    def flat(values: Tensor, at_roots: float) -> Tensor:
        table = values.new_full((len(draft.token_ids), *values.shape[2:]), at_roots)
        table[rows] = values[blocks, steps]
        return table

    confidences, logits = drafts.confidences, drafts.logits
    return replace(
        draft,
        confidences=None if confidences is None else flat(confidences, 1.0),
        logits=None if logits is None else flat(logits, 0.0),
    )
