"""Chains of drafts as a drafter makes them: a fixed number per request, then as many as are kept.

Knows tensors of drafts, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.kernels.draft_chain import ChainRule, Chains, Confidence, Transition
from truespec.kernels.noise import DOMAIN_DRAFT
from truespec.kernels.sampling_draft import int32_ids
from truespec.layers.sampler import (
    SamplingRows,
    sample_draft,
    sampling_rows,
)
from truespec.speculative.base import chain_draft
from truespec.speculative.contract import Draft

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChainDrafts:
    """k drafts for each of n requests.

    Attributes:
        token_ids: [n][k] target ids.
        logprobs: [n][k] the drafter's own.
        confidences: [n][k] conditional acceptance, or `None`.
        logits: [n, k, V] fp32 draft logits over the target's vocabulary, rejection mode only.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    confidences: list[list[float]] | None = None
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
        firsts = np.array([chunk.req.num_tokens for chunk in chunks], np.int64)
        params = [chunk.req.params for chunk in chunks]
        return sampling_rows(params, [1] * len(chunks), torch.from_numpy(firsts))

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

    def chain_rule(
        self,
        rows: SamplingRows,
        transition: Transition,
        previous: Tensor,
        confidence: Confidence | None,
    ) -> ChainRule:
        """How drafts that bias the next one are chosen.

        Args:
            previous: [n] int64 target ids before the first drafts.
            confidence: what tells how sure they are, if anything does.
        """
        return ChainRule(
            previous,
            transition,
            rows.temperature,
            rows.seed,
            rows.position,
            int32_ids(self.vocab_size, self.target_ids),
            self._domain,
            confidence,
            keeps_logits=self.own_stream,
        )

    def drafts_of(self, chains: Chains) -> ChainDrafts:
        """Chains that were drawn by such a rule."""
        return ChainDrafts(
            chains.token_ids.tolist(),
            chains.logprobs.tolist(),
            None if chains.confidences is None else chains.confidences.tolist(),
            None if chains.logits is None else self._over_target(chains.logits),
        )

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
        token_ids=torch.stack([step.token_ids for step in steps], dim=1).tolist(),
        logprobs=torch.stack([step.logprobs for step in steps], dim=1).tolist(),
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
    num_chunks = sum(chunk.samples for chunk in batch.chunks)

    def spread(values: list[list[T]]) -> list[list[T]]:
        kept: list[list[T]] = [[] for _ in range(num_chunks)]
        for place, length, own in zip(active, lengths, values, strict=True):
            kept[place] = own[:length]
        return kept

    draft = chain_draft(
        batch,
        spread(drafts.token_ids),
        spread(drafts.logprobs),
        None if drafts.confidences is None else spread(drafts.confidences),
    )
    if drafts.logits is None:
        return draft
    wide = drafts.logits.new_zeros(len(draft.token_ids), drafts.logits.shape[2])
    firsts = draft.cu_rows.tolist()
    for place, length, own in zip(active, lengths, drafts.logits, strict=True):
        wide[firsts[place] + 1 : firsts[place] + 1 + length] = own[:length]
    return replace(draft, logits=wide)
