"""Edits of logits before sampling: penalties, bias, allowed and banned ids, grammar.

Knows rows and the history of each row's own path (committed tokens and the drafts before it), so
that a verify row is edited as plain decoding would at that position. Knows no batch or worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truespec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What changes in one row, in this order.

    Attributes:
        seen_ids: [m] int64 distinct ids of prompt and output; `repetition_penalty` divides their
            positive logits and multiplies the others.
        output_ids, output_counts: [o] int64, [o] fp32 distinct output ids and how often each came;
            subtracts count * frequency_penalty + presence_penalty.
        bias_ids, bias: [b] int64, [b] fp32 added.
        allowed_ids: [a] int64, all others become -inf; `None` allows all.
        banned_ids: [c] int64 become -inf.
        bitmask: [ceil(V / 32)] int32 words of a grammar, bit i of word w allows id 32 w + i.
    """

    seen_ids: Tensor | None = None
    repetition_penalty: float = 1.0
    output_ids: Tensor | None = None
    output_counts: Tensor | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    allowed_ids: Tensor | None = None
    banned_ids: Tensor | None = None
    bitmask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequestEdits:
    """What the rows of one request share in a step: parameters and committed history.

    Attributes:
        seen: distinct committed ids, prompt and output; empty without a repetition penalty.
        counts: committed output ids and how often each came; empty without output penalties.
        tail: last committed tokens, as many as the longest bad word looks back.
        num_output: committed output tokens.
        stop_ids: masked while fewer than `params.min_tokens` tokens are out.
        bias_ids, bias, allowed_ids: as in `RowEdits`.
    """

    params: SamplingParams
    seen: frozenset[int]
    counts: Counter[int]
    tail: tuple[int, ...]
    num_output: int
    stop_ids: tuple[int, ...]
    bias_ids: Tensor | None
    bias: Tensor | None
    allowed_ids: Tensor | None


def request_edits(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Collection[int] = (),
) -> RequestEdits | None:
    """Prepare the edits of a request's rows in one step; `None` when its logits stay as they are.

    Args:
        output_ids: committed output (kept over a retraction), without this step's drafts.
        stop_ids: ids that end the request.
    """
    is_early = len(output_ids) < params.min_tokens and len(stop_ids) > 0
    if not (
        params.has_penalties
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_ids
        or params.grammar is not None
        or is_early
    ):
        return None
    counts_output = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    look_back = max((len(word) - 1 for word in params.bad_words_ids), default=0)
    return RequestEdits(
        params=params,
        seen=frozenset(prompt_ids) | frozenset(output_ids)
        if params.repetition_penalty != 1.0
        else frozenset(),
        counts=Counter(output_ids) if counts_output else Counter(),
        tail=_tail(prompt_ids, output_ids, look_back),
        num_output=len(output_ids),
        stop_ids=tuple(sorted(stop_ids)) if is_early else (),
        bias_ids=_ids([token for token, _ in params.logit_bias]),
        bias=_floats([value for _, value in params.logit_bias]),
        allowed_ids=None
        if params.allowed_token_ids is None
        else torch.tensor(params.allowed_token_ids, dtype=torch.int64),
    )


def path_edits(
    request: RequestEdits | None, path: Sequence[int] = (), bitmask: Tensor | None = None
) -> RowEdits | None:
    """Edits of the row that follows the drafts `path`; `None` when there are none.

    Args:
        path: drafts between the last committed token and this row's choice, in order.
        bitmask: the grammar's words in the state after `path`.
    """
    if request is None:
        return None if bitmask is None else RowEdits(bitmask=bitmask)
    params = request.params
    repeats = params.repetition_penalty != 1.0
    counts = request.counts
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = counts + Counter(path)
    is_early = request.num_output + len(path) < params.min_tokens
    banned = list(request.stop_ids) if is_early else []
    banned += _completing_ids(params.bad_words_ids, (*request.tail, *path))
    return RowEdits(
        seen_ids=_ids(sorted(request.seen.union(path))) if repeats else None,
        repetition_penalty=params.repetition_penalty,
        output_ids=_ids(list(counts)),
        output_counts=_floats(list(counts.values())),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=request.bias_ids,
        bias=request.bias,
        allowed_ids=request.allowed_ids,
        banned_ids=_ids(banned),
        bitmask=bitmask,
    )


def edit_logits(logits: Tensor, edits: Sequence[RowEdits | None], vocab_size: int) -> Tensor:
    """Apply each row's edits to a copy; the very same tensor when no row has any.

    Args:
        logits: [n, V_padded] fp32/bf16/fp16, not modified.
        edits: one entry per row.

    Returns:
        [n, V_padded] fp32 (or `logits` itself). A row may be left with nothing but -inf; the
        sampler reports it as failed.
    """
    assert len(edits) == logits.shape[0], f"{len(edits)} edits for {logits.shape[0]} rows"
    if all(edit is None for edit in edits):
        return logits
    edited = logits.to(torch.float32, copy=True)
    for row, edit in zip(edited, edits, strict=True):
        if edit is not None:
            _edit_row(row[:vocab_size], edit)
    return edited


def _edit_row(row: Tensor, edit: RowEdits) -> None:
    """Edit [V] fp32 in place."""
    device = row.device
    if edit.seen_ids is not None:
        ids = edit.seen_ids.to(device)
        seen = row[ids]
        penalty = edit.repetition_penalty
        row[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if edit.output_ids is not None and edit.output_counts is not None:
        counts = edit.output_counts.to(device)
        row[edit.output_ids.to(device)] -= counts * edit.frequency_penalty + edit.presence_penalty
    if edit.bias_ids is not None and edit.bias is not None:
        row.index_add_(0, edit.bias_ids.to(device), edit.bias.to(device))
    if edit.allowed_ids is not None:
        ids = edit.allowed_ids.to(device)
        allowed = row[ids]
        row.fill_(-torch.inf)
        row[ids] = allowed
    if edit.banned_ids is not None:
        row[edit.banned_ids.to(device)] = -torch.inf
    if edit.bitmask is not None:
        row.masked_fill_(~_allowed(edit.bitmask.to(device), row.shape[0]), -torch.inf)


def _allowed(bitmask: Tensor, vocab_size: int) -> Tensor:
    """[ceil(V / 32)] int32 words -> [V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask[:, None] >> bits) & 1).to(torch.bool).view(-1)[:vocab_size]


def _completing_ids(words: tuple[tuple[int, ...], ...], history: tuple[int, ...]) -> list[int]:
    """Last ids of the words whose other ids end the history (prompt included)."""
    banned = []
    for word in words:
        start = len(history) - len(word) + 1
        if start >= 0 and history[start:] == word[:-1]:
            banned.append(word[-1])
    return banned


def _tail(prompt_ids: Sequence[int], output_ids: Sequence[int], size: int) -> tuple[int, ...]:
    if size == 0:
        return ()
    return (*prompt_ids[-size:], *output_ids[-size:])[-size:]


def _ids(values: list[int]) -> Tensor | None:
    return torch.tensor(values, dtype=torch.int64) if values else None


def _floats(values: Sequence[float]) -> Tensor | None:
    return torch.tensor(values, dtype=torch.float32) if values else None
