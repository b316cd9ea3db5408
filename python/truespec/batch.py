"""What travels between scheduler, worker, engine and model in one step. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from truespec.core import Req


@dataclass(frozen=True, slots=True)
class ReqChunk:
    """A request's share of one step.

    Attributes:
        req: the request (read-only for workers).
        start: first position to compute; `req.num_computed`.
        num_rows: known tokens to run, positions start .. start + num_rows - 1. A decode has one.
        samples: True when the chunk ends at the last known token, so that a token is chosen.
        max_drafts: drafts the scheduler has reserved slots for (0 while prefilling).
    """

    req: Req
    start: int
    num_rows: int
    samples: bool
    max_drafts: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one step, ragged. Pages for every row and draft are reserved already."""

    chunks: list[ReqChunk]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of one forward pass, flattened over requests.

    A row's keys are positions 0 .. kv_lens - 1 of its request, read through `page_table`; for a
    tree row the positions from `tail_starts` on are read from its own `tail_slots` instead.

    Attributes:
        token_ids: [num_rows] int64.
        positions: [num_rows] int32 absolute positions.
        row_to_req: [num_rows] int32 index into `page_table`.
        out_slots: [num_rows] int64 pool slot (page * page_size + offset) for each row's K/V.
        page_table: [rows of requests, max_pages] int32.
        kv_lens: [num_rows] int32 keys visited; position + 1 for causal rows.
        tail_starts: [num_rows] int32, or `None` when no row has a tail.
        tail_slots: [num_rows, max_tail] int64 slots of positions tail_starts, tail_starts + 1, ...
    """

    token_ids: Tensor
    positions: Tensor
    row_to_req: Tensor
    out_slots: Tensor
    page_table: Tensor
    kv_lens: Tensor
    tail_starts: Tensor | None = None
    tail_slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a target forward leaves behind.

    Attributes:
        hidden: [num_rows, hidden] fp32 after the final norm (the head's input).
        features: [num_rows, num_captured * hidden] fp32 outputs of the captured layers, or `None`.
    """

    hidden: Tensor
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Logprobs on the host, by request and emitted token; see `layers.utils.logprob`.

    Attributes:
        chosen: [modes][bs][D] floats, nan where the mode filters the token; the modes are those
            of each request, in its own order.
        top_ids, top_values: [modes][bs][D][k_max]; id -1 where there is none.
        asked: [modes][bs][D][a_max]; nan where filtered.
        rank: [bs][D] ints; entropy: [bs][D] floats.
    """

    chosen: list[list[list[float]]]
    top_ids: list[list[list[list[int]]]]
    top_values: list[list[list[list[float]]]]
    asked: list[list[list[list[float]]]]
    rank: list[list[int]]
    entropy: list[list[float]]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one worker step on the host, in the order of `Batch.chunks`.

    Attributes:
        token_ids: emitted tokens per request; empty while it prefills.
        num_drafts: drafts verified per request.
        draft_logprobs: the drafter's logprob of each accepted draft.
        failed: why a request failed on its emitted path (after its `token_ids`), or `None`.
        is_complete: the request's grammar admits nothing after its `token_ids`.
        logprobs: of the emitted tokens, with one row per sampling chunk (`logprob_rows` gives a
            chunk's row, -1 where it does not sample); `None` when no request asked.
        prompt_logprobs: per request, tables of the prompt tokens scored in this step, one row per
            token and one token per row, in order.
    """

    token_ids: list[list[int]]
    num_drafts: list[int]
    draft_logprobs: list[list[float]]
    failed: list[str | None]
    is_complete: list[bool]
    logprobs: LogprobTable | None
    logprob_rows: list[int]
    prompt_logprobs: list[list[LogprobTable]]
