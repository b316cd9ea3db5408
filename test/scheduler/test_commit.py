"""What a step's result makes of a request, by hand."""

from __future__ import annotations

from math import nan

from truespec.batch import LogprobTable, ReqChunk, StepOutput
from truespec.core import Req
from truespec.params import LogprobParams, SamplingParams
from truespec.scheduler.commit import commit_chunk


def scored(*logprobs: float) -> LogprobTable:
    """Prompt entries, one token per row."""
    size = len(logprobs)
    return LogprobTable(
        chosen=[[[value] for value in logprobs]],
        top_ids=[[[[]]] * size],
        top_values=[[[[]]] * size],
        asked=[[[[]]] * size],
        rank=[[1]] * size,
        entropy=[[0.0]] * size,
    )


def step_output(token_ids: list[int], *tables: LogprobTable, is_complete: bool) -> StepOutput:
    return StepOutput(
        token_ids=[token_ids],
        num_drafts=[0],
        draft_logprobs=[[]],
        failed=[None],
        is_complete=[is_complete],
        logprobs=None,
        logprob_rows=[0],
        prompt_logprobs=[list(tables)],
    )


def test_a_prompt_entry_that_is_not_a_number_fails_the_request() -> None:
    """NaN that came up after the last keys were written: no later row shows it."""
    wish = LogprobParams(start=0)
    req = Req("r", [5, 6, 7], SamplingParams(max_tokens=0, logprobs=wish), frozenset())
    chunk = ReqChunk(req, start=0, num_rows=3, samples=False, max_drafts=0)
    output = step_output([], scored(-1.0, nan), is_complete=False)
    records, finish = commit_chunk(chunk, output, 0, max_tokens=64)
    assert records == []
    assert finish == ("error", None, "the logprob of prompt token 2 is not a number")


def test_a_complete_grammar_ends_a_request_unless_the_budget_did_before() -> None:
    for max_tokens, kept, kind in ((3, 3, "stop"), (2, 2, "length"), (9, 3, "stop")):
        req = Req("r", [5], SamplingParams(max_tokens=max_tokens), frozenset())
        chunk = ReqChunk(req, start=0, num_rows=1, samples=True, max_drafts=4)
        output = step_output([8, 9, 8], is_complete=True)
        records, finish = commit_chunk(chunk, output, 0, max_tokens=64)
        assert finish is not None
        assert (len(records), finish.kind, req.output_ids) == (kept, kind, [8, 9, 8][:kept])
