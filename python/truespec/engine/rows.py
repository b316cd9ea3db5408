"""Builds the rows of a step: known tokens of every chunk, then its drafts, in one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truespec.batch import Batch, ForwardBatch
from truespec.core import Req
from truespec.kvcache import KVCache

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's forward batch and where its parts lie.

    Attributes:
        forward: all rows.
        first_rows: [bs + 1] first row of each chunk, and the total.
        sample_rows: [num draft rows] forward row of every draft-tree row (roots and drafts of the
            chunks that sample, in order).
        depths: [num draft rows] depth in the draft tree, 0 at a root.
    """

    forward: ForwardBatch
    first_rows: Ints
    sample_rows: Ints
    depths: Ints


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
    ids, tree, cu = token_ids.numpy(), parents.numpy(), cu_rows.numpy()
    depths = _depths(tree)
    known = np.array([c.num_rows for c in batch.chunks], dtype=np.int64)
    samples = np.array([c.samples for c in batch.chunks], dtype=bool)
    starts = np.array([c.start for c in batch.chunks], dtype=np.int64)
    num_nodes = np.zeros_like(known)
    num_nodes[samples] = np.diff(cu)
    num_rows = known + np.maximum(num_nodes - 1, 0)
    first_rows = np.concatenate([[0], np.cumsum(num_rows)])
    row_to_req = np.repeat(np.arange(len(known)), num_rows)
    offsets = np.arange(first_rows[-1]) - first_rows[row_to_req]
    linear = starts[row_to_req] + offsets

    # A draft row sits where its index puts it in the pool and at root + depth in the sequence.
    sampling = np.flatnonzero(samples)
    node_to_req = np.repeat(sampling, num_nodes[sampling])
    node_index = np.arange(len(ids)) - cu[:-1].repeat(num_nodes[sampling])
    roots = first_rows[node_to_req] + known[node_to_req] - 1
    sample_rows = roots + node_index
    positions = linear.copy()
    positions[sample_rows] = linear[roots] + depths

    row_ids = np.empty(first_rows[-1], dtype=np.int64)
    for chunk, first in zip(batch.chunks, first_rows, strict=False):
        row_ids[first : first + chunk.num_rows] = _known_ids(chunk.req, chunk.start, chunk.num_rows)
    row_ids[sample_rows] = ids

    slots, page_table = cache.slots([c.req for c in batch.chunks], row_to_req, linear)
    tails = _tails(tree, depths, node_index, sample_rows, slots, positions)
    forward = ForwardBatch(
        token_ids=torch.from_numpy(row_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        row_to_req=torch.from_numpy(row_to_req.astype(np.int32)),
        out_slots=torch.from_numpy(slots),
        page_table=torch.from_numpy(page_table),
        kv_lens=torch.from_numpy((positions + 1).astype(np.int32)),
        tail_starts=None if tails is None else torch.from_numpy(tails[0]),
        tail_slots=None if tails is None else torch.from_numpy(tails[1]),
    )
    return StepRows(forward, first_rows, sample_rows, depths)


def prepare_known_rows(batch: Batch, cache: KVCache) -> ForwardBatch:
    """Rows of chunks that sample nothing."""
    nothing = torch.empty(0, dtype=torch.int64)
    return prepare_rows(batch, nothing, nothing, torch.zeros(1, dtype=torch.int32), cache).forward


def _known_ids(req: Req, start: int, count: int) -> list[int]:
    prompt, output = req.prompt_ids, req.output_ids
    end, size = start + count, len(prompt)
    if start >= size:
        return output[start - size : end - size]
    return prompt[start:end] + (output[: end - size] if end > size else [])


def _depths(parents: Ints) -> Ints:
    depths = np.zeros_like(parents)
    ancestor = parents.copy()
    while (inside := ancestor >= 0).any():
        depths += inside
        ancestor = np.where(inside, parents[ancestor], -1)
    return depths


def _tails(
    parents: Ints, depths: Ints, node_index: Ints, sample_rows: Ints, slots: Ints, positions: Ints
) -> tuple[NDArray[np.int32], Ints] | None:
    """Ancestor slots of tree rows, root first; `None` when every draft is a chain."""
    if (depths == node_index).all():
        return None
    starts = (positions + 1).astype(np.int32)
    starts[sample_rows] = positions[sample_rows] - depths
    tail_slots = np.zeros((len(slots), int(depths.max()) + 1), dtype=np.int64)
    ancestor = np.arange(len(parents))
    while (inside := ancestor >= 0).any():
        nodes, at = np.flatnonzero(inside), ancestor[inside]
        tail_slots[sample_rows[nodes], depths[at]] = slots[sample_rows[at]]
        ancestor = np.where(inside, parents[ancestor], -1)
    return starts, tail_slots
