"""Turns a step's result into records, and decides at ids and limits where a request ends."""

from __future__ import annotations

from truespec.batch import LogprobTable, ReqChunk, StepOutput
from truespec.core import Cut, Finish, ModeLogprobs, Origin, Req, TokenRecord, cut


def commit_chunk(
    chunk: ReqChunk, output: StepOutput, index: int, *, max_request_tokens: int
) -> Cut:
    """Bring one request up to date with a step.

    Advances `num_computed`, appends prompt records and output tokens.

    Args:
        chunk: the request's share of the step.
        output, index: the step's result and the chunk's place in it.
        max_request_tokens: prompt + output at most.

    Returns the new output records, cut, and the finish if the request is over.
    """
    req = chunk.req
    _commit_prompt(req, output.prompt_logprobs[index])
    req.num_computed = chunk.start + chunk.num_rows
    if not chunk.samples:
        done = req.params.max_tokens == 0 and req.num_computed >= req.num_tokens
        return cut([], 0, Finish("length") if done else None)
    records = _records(chunk, output, index)
    req.num_computed += max(0, len(records) - 1)
    end, finish = _find_end(req, records, max_request_tokens)
    if finish is None and output.failed[index] is not None:
        finish = Finish("error", message=output.failed[index] or "")
    kept = cut(records, end, finish)
    req.output_ids.extend(record.token_id for record in kept.records)
    return kept


def mode_logprobs(table: LogprobTable, index: int, position: int, req: Req) -> tuple[ModeLogprobs, ...]:
    """The asked modes of one token, in the asked order."""
    return table.modes(index, position, req.params.logprobs)


def _records(chunk: ReqChunk, output: StepOutput, index: int) -> list[TokenRecord]:
    token_ids = output.token_ids[index]
    draft_logprobs = output.draft_logprobs[index]
    num_accepted = len(draft_logprobs)
    first: Origin = "target" if chunk.req.output_ids else "prefill"
    wants = chunk.req.params.logprobs is not None
    table = output.logprobs if wants else None
    records = []
    for place, token_id in enumerate(token_ids):
        is_draft = place < num_accepted
        records.append(
            TokenRecord(
                token_id=token_id,
                origin="draft" if is_draft else first,
                position=place,
                num_drafts=output.num_drafts[index],
            )
        )
    return records if table is None else table.attach(records)
