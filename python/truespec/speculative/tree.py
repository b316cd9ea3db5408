"""Dynamic draft trees (EAGLE-2, arXiv 2406.16858): grow by levels, then keep the best nodes.

Knows scores and indices, no model. Everything is batched over n requests; k children per node.
Order is by score, equal scores by age, so that a parent always comes before its children and every
selection is closed under parents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truespec.batch import Batch
from truespec.speculative.contract import Draft


@dataclass(frozen=True, slots=True)
class Frontier:
    """The k nodes of a level that are expanded next.

    Attributes:
        nodes: [n, k] int64 index of each in the pool.
        parents: [n, k] int64 place of each one's parent in the frontier before.
        token_ids: [n, k] int64. scores: [n, k] fp32.
    """

    nodes: Tensor
    parents: Tensor
    token_ids: Tensor
    scores: Tensor


class TreePool:
    """All nodes drafted so far, oldest first; the root is not among them.

    Attributes:
        token_ids: [n, P] int64.
        parents: [n, P] int64 index in the pool, -1 below the root.
        scores: [n, P] fp32 sum of the scores on the path from the root.
        logprobs: [n, P] fp32 the drafter's own.
    """

    def __init__(self, token_ids: Tensor, scores: Tensor, logprobs: Tensor) -> None:
        """Start with the root's k children ([n, k] each; scores at most 0)."""
        self.token_ids, self.scores, self.logprobs = token_ids, scores, logprobs
        self.parents = torch.full_like(token_ids, -1)

    def first_frontier(self) -> Frontier:
        """The root's children, all of them."""
        nodes = torch.arange(self.token_ids.shape[1]).expand_as(self.token_ids)
        return Frontier(nodes, torch.zeros_like(nodes), self.token_ids, self.scores)

    def grow(
        self, frontier: Frontier, token_ids: Tensor, scores: Tensor, logprobs: Tensor
    ) -> Frontier:
        """Add k children to every node of the frontier; the best k of them are the next one.

        Args:
            token_ids, scores, logprobs: [n, k, k] by node and child; scores at most 0.
        """
        num_children = token_ids.shape[2]
        start = self.token_ids.shape[1]
        total = (frontier.scores.unsqueeze(2) + scores).flatten(1)
        best = _best(total, token_ids.shape[1])
        flat_ids = token_ids.flatten(1)
        nodes = frontier.nodes.repeat_interleave(num_children, dim=1)
        self.token_ids = torch.cat([self.token_ids, flat_ids], dim=1)
        self.scores = torch.cat([self.scores, total], dim=1)
        self.logprobs = torch.cat([self.logprobs, logprobs.flatten(1)], dim=1)
        self.parents = torch.cat([self.parents, nodes], dim=1)
        return Frontier(
            nodes=best + start,
            parents=best // num_children,
            token_ids=flat_ids.gather(1, best),
            scores=total.gather(1, best),
        )

    def survivals(self, counts: list[int]) -> list[list[float]]:
        """Of the best `counts[i]` nodes of request i, how likely each is accepted; falling."""
        best = self.scores.sort(dim=1, descending=True).values.exp().tolist()
        return [values[:count] for values, count in zip(best, counts, strict=True)]

    def select(self, counts: list[int], num_kept: int) -> Tensor:
        """[n, P] bool: the best `counts[i]` nodes of request i, `num_kept` at most."""
        best = _best(self.scores, min(num_kept, self.scores.shape[1]))
        ranks = torch.arange(best.shape[1]).expand_as(best)
        is_kept = ranks < torch.tensor(counts).unsqueeze(1)
        return torch.zeros_like(self.scores, dtype=torch.bool).scatter_(1, best, is_kept)


def draft_of_trees(batch: Batch, active: list[int], pool: TreePool, kept: Tensor) -> Draft:
    """Roots with the kept nodes behind them.

    Args:
        active: which of the batch's sampling chunks the pool is for, ascending; n of them.
        kept: [n, P] of `TreePool.select`.
    """
    roots = torch.tensor([chunk.req.last_token_id for chunk in batch.chunks if chunk.samples])
    places = torch.tensor(active)
    shape = (len(roots), 1 + kept.shape[1])
    is_row = torch.zeros(shape, dtype=torch.bool)
    is_row[:, 0] = True
    is_row[places, 1:] = kept
    row = is_row.flatten().cumsum(0).view(shape) - 1
    parents = torch.full(shape, -1)
    # Column 0 is the root, so node i of the pool is column i + 1.
    parents[places, 1:] = row[places].gather(1, pool.parents + 1)
    token_ids = torch.zeros(shape, dtype=torch.int64)
    token_ids[:, 0] = roots
    token_ids[places, 1:] = pool.token_ids
    logprobs = torch.zeros(shape)
    logprobs[places, 1:] = pool.logprobs
    counts = is_row.sum(1)
    return Draft(
        token_ids=token_ids[is_row],
        parents=parents[is_row],
        cu_rows=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32),
        logprobs=logprobs[is_row],
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """[n, count] indices of the highest scores, of equal ones the lowest; best first."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
