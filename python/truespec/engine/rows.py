"""Builds the rows of a step: known tokens of every chunk, then its drafts, in one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truespec.batch import Batch, ForwardBatch
from truespec.core import Req
from truespec.kvcache import KVCache
from truespec.kvcache.cache import Placed

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's forward batch and where its parts lie.

    Attributes:
        forward: all rows.
        first_rows: [bs + 1] first row of each chunk, and the total.
        sample_rows: [num draft rows] forward row of every draft-tree row (roots and drafts of the
            chunks that sample, in order), ascending.
        next_positions: [num draft rows] int64 position of the token that each of them chooses.
    """

    forward: ForwardBatch
    first_rows: list[int]
    sample_rows: list[int]
    next_positions: Tensor


def prepare_rows(
    batch: Batch, token_ids: Tensor, parents: Tensor, cu_rows: Tensor, cache: KVCache
) -> StepRows:
    """Lay out one step.

    Args:
        batch: chunks; pages for all rows are reserved.
        token_ids, parents, cu_rows: the draft over the sampling chunks, as in
            `speculative.contract.Draft` ([n], [n], [number of sampling chunks + 1], on the host).
        cache: its page table gives the slots.
    """
    ids, cu = token_ids.tolist(), cu_rows.tolist()
    row_ids: list[int] = []
    sample_rows: list[int] = []
    next_positions: list[int] = []
    first_rows = [0]
    drafts = pairwise(cu)
    for chunk in batch.chunks:
        row_ids += _known_ids(chunk.req, chunk.start, chunk.num_rows)
        if chunk.samples:
            begin, end = next(drafts)
            root, first = len(row_ids) - 1, chunk.start + chunk.num_rows
            sample_rows += range(root, root + end - begin)
            next_positions += range(first, first + end - begin)
            row_ids += ids[begin + 1 : end]
        first_rows.append(len(row_ids))
    counts = [end - begin for begin, end in pairwise(first_rows)]
    reqs, starts = [c.req for c in batch.chunks], [c.start for c in batch.chunks]
    placed = cache.place(reqs, starts, counts)
    nexts = np.array(next_positions, np.int64)
    tails = None
    if not _is_chain(parents.tolist()):
        tails = _branch(parents.numpy(), cu, sample_rows, placed, nexts)
    forward = ForwardBatch(
        token_ids=torch.from_numpy(np.array(row_ids, np.int64)),
        positions=torch.from_numpy(placed.positions),
        row_to_req=torch.from_numpy(placed.row_to_req),
        out_slots=torch.from_numpy(placed.slots),
        page_table=cache.shared_table,
        kv_lens=torch.from_numpy(placed.positions + 1),
        tail_starts=None if tails is None else torch.from_numpy(tails[0]),
        tail_slots=None if tails is None else torch.from_numpy(tails[1]),
    )
    return StepRows(forward, first_rows, sample_rows, torch.from_numpy(nexts))


def prepare_known_rows(batch: Batch, cache: KVCache) -> ForwardBatch:
    """Rows of chunks that sample nothing."""
    nothing = torch.empty(0, dtype=torch.int64)
    return prepare_rows(batch, nothing, nothing, torch.zeros(1, dtype=torch.int32), cache).forward


def take_rows(source: Tensor, rows: list[int]) -> Tensor:
    """[len(rows), ...] ascending rows of `source` [n, ...]; a view where they are adjacent."""
    if len(rows) == len(source):
        return source
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return source[rows[0] : rows[-1] + 1]
    return source.index_select(0, torch.from_numpy(np.array(rows, np.int64)))


def _known_ids(req: Req, start: int, count: int) -> list[int]:
    prompt, output = req.prompt_ids, req.output_ids
    end, size = start + count, len(prompt)
    if start >= size:
        return output[start - size : end - size]
    return prompt[start:end] + (output[: end - size] if end > size else [])


def _is_chain(parents: list[int]) -> bool:
    """Every draft follows the row before it."""
    return all(parent in (-1, row - 1) for row, parent in enumerate(parents))


def _depths(parents: Ints) -> Ints:
    """In the draft tree, 0 at a root."""
    depths = np.zeros_like(parents)
    ancestor = parents.copy()
    while (inside := ancestor >= 0).any():
        depths += inside
        ancestor = np.where(inside, parents[ancestor], -1)
    return depths


def _branch(
    parents: Ints, cu_rows: list[int], sample_rows: list[int], placed: Placed, nexts: Ints
) -> tuple[NDArray[np.int32], Ints]:
    """Move the rows of a tree to their positions, and find their ancestors.

    A draft row sits where its index puts it in the pool and at root + depth in the sequence.

    Args:
        placed: its positions are changed. nexts: [num draft rows], changed.

    Returns from which position on tails count [n], and the ancestors' slots, root first.
    """
    depths, rows = _depths(parents), np.array(sample_rows)
    indices = [index for begin, end in pairwise(cu_rows) for index in range(end - begin)]
    shift = depths - np.array(indices)
    nexts += shift
    placed.positions[rows] += shift.astype(np.int32)
    starts = placed.positions + 1
    starts[rows] = placed.positions[rows] - depths
    tail_slots = np.zeros((len(starts), int(depths.max()) + 1), dtype=np.int64)
    ancestor = np.arange(len(parents))
    while (inside := ancestor >= 0).any():
        nodes, at = np.flatnonzero(inside), ancestor[inside]
        tail_slots[rows[nodes], depths[at]] = placed.slots[rows[at]]
        ancestor = np.where(inside, parents[ancestor], -1)
    return starts, tail_slots
