"""Draft trees: selection against a plain sort, closure under parents, ties, and their rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.core import Req
from truespec.params import SamplingParams
from truespec.speculative.tree import TreePool, draft_of_trees


def _scores(rng: random.Random, *shape: int, coarse: bool) -> Tensor:
    """Log-probabilities; coarse ones tie often, and 0 leaves a child level with its parent."""
    count = 1
    for size in shape:
        count *= size
    values = [rng.choice((0.0, -0.5, -1.0)) if coarse else -rng.random() * 4 for _ in range(count)]
    return torch.tensor(values).view(*shape)


def _grow(rng: random.Random, n: int, k: int, depth: int, *, coarse: bool) -> TreePool:
    def ids(*shape: int) -> Tensor:
        return torch.randint(
            0, 99, shape, generator=torch.Generator().manual_seed(rng.randint(0, 99))
        )

    pool = TreePool(ids(n, k), _scores(rng, n, k, coarse=coarse), torch.zeros(n, k))
    frontier = pool.first_frontier()
    for _ in range(depth - 1):
        scores = _scores(rng, n, k, k, coarse=coarse)
        frontier = pool.grow(frontier, ids(n, k, k), scores, scores)
    return pool


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 3),
    k=st.integers(1, 4),
    depth=st.integers(1, 5),
    coarse=st.booleans(),
)
def test_the_kept_nodes_are_the_best_and_no_child_is_kept_without_its_parent(
    seed: int, n: int, k: int, depth: int, coarse: bool
) -> None:
    rng = random.Random(seed)
    pool = _grow(rng, n, k, depth, coarse=coarse)
    size = pool.scores.shape[1]
    assert size == k + (depth - 1) * k * k
    counts = [rng.randint(1, size) for _ in range(n)]
    kept = pool.select(counts, max(counts))
    for request, count in enumerate(counts):
        scores = pool.scores[request].tolist()
        order = sorted(range(size), key=lambda i: (-scores[i], i))
        nodes = torch.nonzero(kept[request])[:, 0].tolist()
        assert nodes == sorted(order[:count])
        for node in nodes:
            parent = int(pool.parents[request, node])
            assert parent < node
            assert parent == -1 or parent in nodes


def test_survivals_are_the_shares_of_the_best_nodes() -> None:
    pool = _grow(random.Random(1), 2, 3, 3, coarse=False)
    for values, scores in zip(pool.survivals([4, 0]), pool.scores.tolist(), strict=True):
        best = sorted((math.exp(score) for score in scores), reverse=True)
        assert values == pytest.approx(best[: len(values)])
    assert [len(values) for values in pool.survivals([4, 0])] == [4, 0]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 4), depth=st.integers(2, 5))
def test_a_level_expands_the_best_nodes_of_the_level_before(seed: int, k: int, depth: int) -> None:
    rng = random.Random(seed)
    pool = _grow(rng, 1, k, depth, coarse=True)
    scores, parents = pool.scores[0].tolist(), pool.parents[0].tolist()
    level = list(range(k))
    for start in range(k, len(scores), k * k):
        assert sorted(set(parents[start : start + k * k])) == sorted(level)
        children = range(start, start + k * k)
        level = sorted(children, key=lambda i: (-scores[i], i))[:k]


def _batch(num: int, samples: list[bool]) -> Batch:
    reqs = [Req(str(i), [10 + i], SamplingParams(), frozenset()) for i in range(num)]
    return Batch([ReqChunk(req, 0, 1, flag, 8) for req, flag in zip(reqs, samples, strict=True)])


def test_rows_are_roots_with_their_kept_nodes_parents_first() -> None:
    # Pool of one request: children a, b of the root, then a's children c, d and b's children e, f.
    pool = TreePool(
        torch.tensor([[1, 2]]), torch.tensor([[-1.0, -0.5]]), torch.tensor([[-9.0, -8.0]])
    )
    pool.grow(
        pool.first_frontier(),
        torch.tensor([[[3, 4], [5, 6]]]),
        torch.tensor([[[-0.1, -3.0], [-0.2, -2.0]]]),
        torch.tensor([[[-1.0, -2.0], [-3.0, -4.0]]]),
    )
    batch = _batch(3, [True, False, True])
    draft = draft_of_trees(batch, [1], pool, pool.select([4], 4))
    assert draft.token_ids.tolist() == [10, 12, 1, 2, 3, 5]
    assert draft.parents.tolist() == [-1, -1, 1, 1, 2, 3]
    assert draft.cu_rows.tolist() == [0, 1, 6]
    assert draft.logprobs.tolist() == [0, 0, -9, -8, -1, -3]


@pytest.mark.parametrize("worst", [float("-inf"), 0.0])
def test_a_drafter_that_knows_nothing_still_gives_a_tree(worst: float) -> None:
    """All scores tie (a NaN row scores -inf): the oldest nodes are kept."""
    tied = torch.full((1, 2), worst)
    pool = TreePool(torch.tensor([[1, 2]]), tied, tied)
    pool.grow(
        pool.first_frontier(),
        torch.zeros(1, 2, 2).long(),
        tied.expand(2, 2)[None],
        tied.expand(2, 2)[None],
    )
    assert torch.nonzero(pool.select([3], 3)[0])[:, 0].tolist() == [0, 1, 2]
