"""Why a request cannot go on: what the model computed, or what its parameters forbid.

Looks at one row after the fact; decides nothing.
"""

from __future__ import annotations

from torch import Tensor

from truespec.batch import Batch
from truespec.engine.rows import StepRows
from truespec.params import SamplingParams
from truespec.speculative.contract import Draft, Verdict

NOT_A_NUMBER = "the model's output is not a number"


def failures(
    batch: Batch, draft: Draft, rows: StepRows, verdict: Verdict, raw: Tensor, hidden: Tensor
) -> list[str | None]:
    """Why each chunk of a step failed, `None` where it did not.

    Args:
        raw: [num draft rows, V] logits of the model.
        hidden: [num rows, hidden]. A chunk that samples nothing is judged by its last row: every
            position it computed is among that row's keys, so none of them is bad if it is not.
    """
    has_failed = verdict.failed.tolist()
    problems: list[str | None] = []
    sampling = 0
    for chunk, last in zip(batch.chunks, rows.first_rows[1:], strict=True):
        if not chunk.samples:
            is_bad = not bool(hidden[last - 1].isfinite().all())
            problems.append(NOT_A_NUMBER if is_bad else None)
            continue
        row = _failed_row(draft, verdict, sampling) if has_failed[sampling] else None
        problems.append(None if row is None else failure_reason(raw[row], chunk.req.params))
        sampling += 1
    return problems


def failure_reason(row: Tensor, params: SamplingParams) -> str:
    """Why no token could be chosen in a row.

    Args:
        row: [V] logits of the model, before any edit.
    """
    largest = row.max()  # NaN if any is
    if not bool(largest.isfinite()):
        return f"{NOT_A_NUMBER} at the next token"
    acting = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_ids),
        "logit_bias": bool(params.logit_bias),
        "min_tokens": params.min_tokens > 0,
        "the grammar": params.grammar is not None,
    }
    names = " and ".join(name for name, acts in acting.items() if acts)
    return f"no token may be chosen: {names} forbid every one"


def _failed_row(draft: Draft, verdict: Verdict, index: int) -> int:
    """The draft row that ended a request's path: where its last emitted token leads."""
    count = int(verdict.num_tokens[index])
    if count == 0:
        return int(draft.cu_rows[index])
    parent, token_id = verdict.row_index[index, count - 1], verdict.token_ids[index, count - 1]
    children = (draft.parents == parent) & (draft.token_ids == token_id)
    return int(children.nonzero()[0])
