"""Every row of a step through the one sampler, with its own parameters, history and position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from truespec.batch import Batch
from truespec.core import Req
from truespec.engine.rows import StepRows
from truespec.layers.logits_process import RowEdits, edit_logits, path_edits, request_edits
from truespec.layers.sampler import SampledRows, SamplingRows, sample, sampling_rows
from truespec.speculative.contract import Draft


class ProcessedStep(NamedTuple):
    """What the sampler made of a step's rows, kept for the logprobs of the processed modes.

    Attributes:
        logits: [num draft rows, V] after penalties, bias and masks; the raw tensor if none acts.
        rows: parameters per row.
        sampled: choices per row.
    """

    logits: Tensor
    rows: SamplingRows
    sampled: SampledRows


def process_step(
    batch: Batch,
    draft: Draft,
    rows: StepRows,
    raw_logits: Tensor,
    vocab_size: int,
    masks: Sequence[Tensor | None],
) -> ProcessedStep:
    """Edit and sample the rows of a draft.

    Args:
        raw_logits: [num draft rows, V] fp32, not modified.
        masks: per draft row what its grammar allows, see `RowEdits.bitmask`.
    """
    reqs = [chunk.req for chunk in batch.chunks if chunk.samples]
    ranges = list(pairwise(draft.cu_rows.tolist()))
    counts = [end - begin for begin, end in ranges]
    values = sampling_rows([req.params for req in reqs], counts, rows.next_positions)
    edits: list[RowEdits | None] = []
    for req, (begin, end) in zip(reqs, ranges, strict=True):
        edits += _edits(req, draft, begin, end, masks)
    logits = edit_logits(raw_logits, edits, vocab_size)
    return ProcessedStep(logits, values, sample(logits, values, vocab_size))


def _edits(
    req: Req, draft: Draft, first: int, end: int, masks: Sequence[Tensor | None]
) -> list[RowEdits | None]:
    """Edits of a request's rows: each row follows the drafts on its own path from the root."""
    shared = request_edits(req.params, req.prompt_ids, req.output_ids, req.stop_ids)
    if shared is None:
        return [None] * (end - first)
    ids, parents = draft.token_ids[first:end].tolist(), draft.parents[first:end].tolist()
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(ids[1:], parents[1:], strict=True):
        paths.append((*paths[parent - first], token_id))
    return [
        path_edits(shared, path, mask) for path, mask in zip(paths, masks[first:end], strict=True)
    ]
