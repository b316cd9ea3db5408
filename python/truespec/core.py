"""Records and requests: the facts about generated tokens and the one place that cuts them.

Torch-free. Text, ids, logprobs, usage and metrics are all cut from the same list of records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from truespec.params import SamplingParams

Origin = Literal["draft", "target", "prefill", "prompt"]
FinishKind = Literal["stop", "length", "abort", "error"]


class ModeLogprobs(NamedTuple):
    """Logprobs of one token in one mode.

    Attributes:
        logprob: of the chosen token; `None` for the first prompt token and where it is filtered.
        top_ids, top_logprobs: the best alternatives, best first, ties to the lowest id.
        asked: logprobs of the asked ids in the asked order; `None` where the mode filters an id.
    """

    logprob: float | None
    top_ids: list[int] = []  # noqa: RUF012 (a NamedTuple default, never mutated)
    top_logprobs: list[float] = []  # noqa: RUF012 (as above)
    asked: list[float | None] = []  # noqa: RUF012 (as above)


class TokenRecord(NamedTuple):
    """Everything known about one token, made once by `scheduler.commit`.

    Attributes:
        token_id: in the target's vocabulary.
        origin: "draft" an accepted draft, "target" a correction, bonus or plain token,
            "prefill" the first token after a prompt, "prompt" a scored prompt token.
        position: place inside its step, 0 for the first token the step emitted.
        num_drafts: drafts that the step verified for this request.
        modes: one entry per asked mode, in the asked order; empty when no logprobs were asked.
        rank: 1 + number of tokens with a higher raw logit; 0 when not asked.
        entropy: of the raw distribution, nats; `None` when not asked.
        draft_logprob: the drafter's own logprob of an accepted draft.
    """

    token_id: int
    origin: Origin
    position: int = 0
    num_drafts: int = 0
    modes: tuple[ModeLogprobs, ...] = ()
    rank: int = 0
    entropy: float | None = None
    draft_logprob: float | None = None


class Finish(NamedTuple):
    """Why a request ended.

    Attributes:
        kind: "stop", "length", "abort" or "error".
        matched: the stop id or stop string, for "stop".
        message: for "abort" and "error".
    """

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""


class Cut(NamedTuple):
    """The kept records of a request and why the rest is not there."""

    records: list[TokenRecord]
    finish: Finish | None


def cut(records: list[TokenRecord], end: int, finish: Finish | None) -> Cut:
    """Keep `records[:end]`. Every trimming of output goes through here, once."""
    assert 0 <= end <= len(records), f"cut at {end} of {len(records)} records"
    return Cut(records[:end], finish)


@dataclass(slots=True)
class Req:
    """A request inside the engine process; owned by the scheduler.

    Attributes:
        rid: unique name.
        prompt_ids: the prompt, never changed.
        output_ids: committed tokens so far (kept over a retraction).
        num_computed: positions 0..num_computed-1 have valid KV in the request's pages.
        row: index of its row in the engine's request table, -1 while it waits.
        pages: its pages in order; the first `num_shared_pages` belong to the prefix cache.
        num_cached_tokens: prompt tokens found in the prefix cache at its first admission.
        prompt_records: scored prompt entries so far, from `logprobs.start` on.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    priority: int = 0
    arrival: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_shared_pages: int = 0
    num_cached_tokens: int | None = None
    prompt_records: list[TokenRecord] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, a new list."""
        return self.prompt_ids + self.output_ids

    @property
    def last_token_id(self) -> int:
        """The last known token: the root of the next draft."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def next_scored(self) -> int | None:
        """Prompt position whose entry is made next; `None` when no more entries are wanted."""
        logprobs = self.params.logprobs
        if logprobs is None or logprobs.start < 0:
            return None
        position = logprobs.start + len(self.prompt_records)
        return position if position < len(self.prompt_ids) else None

    @property
    def is_prefilling(self) -> bool:
        """More than the last known token has to be computed before the next one can be chosen."""
        return self.num_computed < self.num_tokens - 1
