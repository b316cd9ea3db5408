"""Asks the one logprob helper for what the requests of a step want; packs questions only."""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.batch import Batch, LogprobTable, ReqChunk
from truespec.engine.rows import StepRows
from truespec.engine.runner import ModelRunner
from truespec.layers.utils.logprob import (
    LogprobSpec,
    ProcessedRows,
    compute_spec_v2_logprobs,
    logprob_spec,
)
from truespec.speculative.contract import Verdict
from truespec.speculative.sampling import ProcessedStep

HEAD_ROWS = 64  # prompt rows that go through the head at once


def verdict_logprobs(
    batch: Batch, raw_logits: Tensor, verdict: Verdict, step: ProcessedStep, vocab_size: int
) -> LogprobTable | None:
    """Of the emitted tokens, by sampling chunk; `None` when no request asks."""
    wishes = [chunk.req.params.logprobs for chunk in batch.chunks if chunk.samples]
    if all(wish is None for wish in wishes):
        return None
    processed = ProcessedRows(
        logits=step.logits,
        temperature=step.rows.temperature,
        keep_threshold=step.sampled.keep_threshold,
        tie_id=step.sampled.tie_id,
    )
    output = compute_spec_v2_logprobs(
        raw_logits,
        verdict.token_ids,
        verdict.row_index,
        verdict.num_tokens,
        vocab_size=vocab_size,
        spec=logprob_spec(wishes),
        processed=processed,
    )
    return LogprobTable(*output.to_host())


def prompt_logprobs(
    batch: Batch, rows: StepRows, hidden: Tensor, runner: ModelRunner, vocab_size: int
) -> list[list[LogprobTable]]:
    """Of the prompt tokens that each chunk's rows predict, in blocks of at most 64 rows.

    Every scored row enters the helper as a request of its own with one token.
    """
    tables: list[list[LogprobTable]] = []
    for chunk, first in zip(batch.chunks, rows.first_rows, strict=False):
        begin, end = scored_entries(chunk)
        blocks = []
        for start in range(begin, end, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, end)
            at = first + start - 1 - chunk.start
            logits = runner.logits(hidden[at : at + stop - start])
            spec = logprob_spec([chunk.req.params.logprobs] * (stop - start), prompt=True)
            blocks.append(_score(logits, chunk.req.prompt_ids[start:stop], spec, vocab_size))
        tables.append(blocks)
    return tables


def scored_entries(chunk: ReqChunk) -> tuple[int, int]:
    """Prompt positions [begin, end) whose entries come from the rows of this chunk.

    The entry of position i is read from row i - 1; a chunk's last row scores the next chunk's
    first token, and position 0 has no row at all.
    """
    position = chunk.req.next_scored
    if position is None:
        return 0, 0
    begin = max(position, 1)
    end = min(len(chunk.req.prompt_ids), chunk.start + chunk.num_rows + 1)
    assert end <= begin or begin - 1 >= chunk.start, f"entry {begin}: its row was skipped"
    return begin, max(begin, end)


def _score(
    logits: Tensor, token_ids: list[int], spec: LogprobSpec, vocab_size: int
) -> LogprobTable:
    count = len(token_ids)
    output = compute_spec_v2_logprobs(
        logits,
        torch.tensor(token_ids).unsqueeze(1),
        torch.arange(count).unsqueeze(1),
        torch.ones(count, dtype=torch.int32),
        vocab_size=vocab_size,
        spec=spec,
        processed=None,
    )
    return LogprobTable(*output.to_host())
