"""Turns a step's result into records, and decides at ids and limits where a request ends."""

from __future__ import annotations

from math import isnan

from truespec.batch import LogprobTable, ReqChunk, StepOutput
from truespec.core import Cut, Finish, ModeLogprobs, Origin, Req, TokenRecord, cut
from truespec.params import LogprobParams


def commit_chunk(chunk: ReqChunk, output: StepOutput, index: int, *, max_tokens: int) -> Cut:
    """Bring one request up to date with a step.

    Advances `num_computed`, appends prompt records and output tokens.

    Args:
        chunk: the request's share of the step.
        output, index: the step's result and the chunk's place in it.
        max_tokens: prompt + output at most.

    Returns the new output records, cut, and the finish if the request is over.
    """
    req = chunk.req
    prompt_problem = _commit_prompt(req, output.prompt_logprobs[index])
    problem = output.failed[index] or prompt_problem
    req.num_computed = chunk.start + chunk.num_rows
    if not chunk.samples:
        done = req.params.max_tokens == 0 and req.num_computed >= req.num_tokens
        finish = Finish("length") if done else None
        return cut([], 0, finish if problem is None else Finish("error", message=problem))
    records = _records(chunk, output, index)
    req.num_computed += max(0, len(records) - 1)
    end, finish = _find_end(req, records, max_tokens, is_complete=output.is_complete[index])
    if finish is None and problem is not None:
        finish = Finish("error", message=problem)
    kept = cut(records, end, finish)
    req.output_ids.extend(record.token_id for record in kept.records)
    return kept


def _commit_prompt(req: Req, tables: list[LogprobTable]) -> str | None:
    """Append the entries of scored prompt tokens; nothing precedes the first token.

    Returns what is wrong with them, if anything is.
    """
    if req.next_scored == 0:
        req.prompt_records.append(
            TokenRecord(req.prompt_ids[0], "prompt", modes=(ModeLogprobs(None),))
        )
    wish, problem = req.params.logprobs, None
    for table in tables:
        assert wish is not None, "a table of prompt tokens nobody asked for"
        for row in range(len(table.rank)):
            position = wish.start + len(req.prompt_records)
            token_id = req.prompt_ids[position]
            if isnan(table.chosen[0][row][0]):
                problem = f"the logprob of prompt token {position} is not a number"
            modes = _modes(table, row, 0, wish, wish.prompt_top_k, 1)
            rank, entropy = _details(table, row, 0, wish)
            req.prompt_records.append(
                TokenRecord(token_id, "prompt", modes=modes, rank=rank, entropy=entropy)
            )
    return problem


def _records(chunk: ReqChunk, output: StepOutput, index: int) -> list[TokenRecord]:
    draft_logprobs = output.draft_logprobs[index]
    first: Origin = "target" if chunk.req.output_ids else "prefill"
    num_drafts, row = output.num_drafts[index], output.logprob_rows[index]
    wish, table = chunk.req.params.logprobs, output.logprobs
    modes: tuple[ModeLogprobs, ...] = ()
    details: tuple[int, float | None] = (0, None)
    records = []
    for place, token_id in enumerate(output.token_ids[index]):
        if wish is not None and table is not None:
            modes = _modes(table, row, place, wish, wish.top_k, len(wish.modes))
            details = _details(table, row, place, wish)
        accepted = place < len(draft_logprobs)
        draft_logprob = draft_logprobs[place] if accepted else None
        origin = "draft" if accepted else first
        records.append(
            TokenRecord(token_id, origin, place, num_drafts, modes, *details, draft_logprob)
        )
    return records


def _modes(
    table: LogprobTable, row: int, place: int, wish: LogprobParams, top_k: int, num_modes: int
) -> tuple[ModeLogprobs, ...]:
    """What the table knows of a token in each asked mode."""
    num_asked = len(wish.token_ids)
    modes = []
    for mode in range(num_modes):
        top_ids = table.top_ids[mode][row][place][:top_k]
        while top_ids and top_ids[-1] < 0:
            top_ids.pop()  # fewer tokens were kept than asked for
        chosen = table.chosen[mode][row][place]
        modes.append(
            ModeLogprobs(
                None if isnan(chosen) else chosen,
                top_ids,
                table.top_values[mode][row][place][: len(top_ids)],
                [None if isnan(v) else v for v in table.asked[mode][row][place][:num_asked]],
            )
        )
    return tuple(modes)


def _details(
    table: LogprobTable, row: int, place: int, wish: LogprobParams
) -> tuple[int, float | None]:
    """Rank and entropy of a token, if they are asked."""
    return (table.rank[row][place], table.entropy[row][place]) if wish.details else (0, None)


def _find_end(
    req: Req, records: list[TokenRecord], max_tokens: int, *, is_complete: bool
) -> tuple[int, Finish | None]:
    """How many records stay, and why the request ends there (or `None`).

    `is_complete`: its grammar allows nothing after the records.
    """
    left = min(req.params.max_tokens - len(req.output_ids), max_tokens - req.num_tokens)
    for place, record in enumerate(records[:left]):
        if record.token_id in req.stop_ids:
            return place + 1, Finish("stop", matched=record.token_id)
    if is_complete and len(records) <= left:
        return len(records), Finish("stop")
    if len(records) >= left:
        return left, Finish("length")
    return len(records), None
