"""Runs requests with and without speculation and recomputes their logprobs by prompt scoring.

Two claims are checked to the bit: the tokens and logprobs are those of plain decoding, and each
logprob is that of the row which produced the token (the same text, scored as a prompt, gives the
same values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from truespec.core import TokenRecord
from truespec.llm import LLM, Generation
from truespec.params import LogprobParams, SamplingParams, random_seed

TOP_K = 5
GREEDY_TEMPERATURE = 0.0


@dataclass(frozen=True, slots=True)
class RequestAudit:
    """What was found for one request.

    Attributes:
        num_tokens: output tokens of plain decoding.
        num_equal_tokens: leading tokens that are equal with speculation.
        max_difference: largest difference of a logprob with and without speculation, over the equal
            tokens, chosen and top 5.
        max_rescored_difference: the same against the text scored as a prompt.
        num_accepted: drafts that speculation had accepted.
    """

    prompt_ids: list[int]
    params: SamplingParams
    num_tokens: int
    num_equal_tokens: int
    max_difference: float
    max_rescored_difference: float
    num_accepted: int

    @property
    def passed(self) -> bool:
        """Equal to the bit in every respect."""
        same_tokens = self.num_equal_tokens == self.num_tokens
        return same_tokens and self.max_difference == 0 and self.max_rescored_difference == 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All requests of an audit."""

    requests: list[RequestAudit]

    @property
    def passed(self) -> bool:
        """Every request passed, and drafts were accepted (else nothing was shown)."""
        return all(r.passed for r in self.requests) and self.num_accepted > 0

    @property
    def num_accepted(self) -> int:
        """Accepted drafts over all requests."""
        return sum(r.num_accepted for r in self.requests)


def audit(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperatures: Sequence[float],
) -> AuditReport:
    """Audit an engine with a drafter.

    Args:
        llm: its speculative algorithm is the one under test.
        prompts: token ids.
        max_tokens: output per request.
        temperatures: every prompt runs at each of them, with a seed of its own.
    """
    wish = LogprobParams(top_k=TOP_K)
    ids = [list(prompt) for _ in temperatures for prompt in prompts]
    params = [
        SamplingParams(temperature=t, seed=random_seed(), max_tokens=max_tokens, logprobs=wish)
        for t in temperatures
        for _ in prompts
    ]
    drafted = llm.generate(ids, params)
    plain = llm.generate(ids, [replace(p, speculative=False) for p in params])
    rescored = llm.generate(
        [g.prompt_ids + g.token_ids for g in drafted],
        [_scoring(len(prompt)) for prompt in ids],
    )
    rows = zip(params, drafted, plain, rescored, strict=True)
    return AuditReport([_compare(*row) for row in rows])


def _scoring(start: int) -> SamplingParams:
    wish = LogprobParams(prompt_top_k=TOP_K, start=start)
    return SamplingParams(temperature=GREEDY_TEMPERATURE, max_tokens=0, logprobs=wish)


def _compare(
    params: SamplingParams, drafted: Generation, plain: Generation, rescored: Generation
) -> RequestAudit:
    equal = 0
    for ours, theirs in zip(drafted.token_ids, plain.token_ids, strict=False):
        if ours != theirs:
            break
        equal += 1
    same_length = len(drafted.records) == len(plain.records)
    return RequestAudit(
        prompt_ids=drafted.prompt_ids,
        params=params,
        num_tokens=len(plain.records),
        num_equal_tokens=equal if same_length else min(equal, len(plain.records) - 1),
        max_difference=_difference(drafted.records[:equal], plain.records[:equal]),
        max_rescored_difference=_difference(drafted.records, rescored.prompt_records),
        num_accepted=drafted.acceptance.num_accepted,
    )


def _difference(ours: Sequence[TokenRecord], theirs: Sequence[TokenRecord]) -> float:
    """Largest difference of raw logprobs; infinite where other tokens are listed."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        mode, other = a.modes[0], b.modes[0]
        if a.token_id != b.token_id or mode.top_ids != other.top_ids:
            return float("inf")
        left = [mode.logprob or 0.0, *mode.top_logprobs]
        right = [other.logprob or 0.0, *other.top_logprobs]
        largest = max(largest, *(abs(x - y) for x, y in zip(left, right, strict=True)))
    return largest
