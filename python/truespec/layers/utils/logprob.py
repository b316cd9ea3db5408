"""Logprobs of emitted tokens, each from the target row that produced it. Pure tensors.

Knows rows of logits, verdicts and packed questions; names nothing of who asks. No `[rows, vocab]`
table of logprobs is ever made: memory grows with emitted tokens times what is asked of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from truespec.kernels.logprob import EditedRows, SlotQuestions, answer_slots
from truespec.kernels.logprob_output import LogprobOutput
from truespec.params import LOGPROB_MODES, LogprobMode, LogprobParams

NO_MODE = -1


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """What each of bs requests wants to know of its tokens, packed.

    Attributes:
        k: [bs] int32 best alternatives per token.
        modes: [bs, M] int8 index into `LOGPROB_MODES`, in the request's own order; -1 is none.
        asked_ids: [num_asked] int64, in the asked order, duplicates kept.
        cu_asked: [bs + 1] int32 offsets into `asked_ids`.
        k_max, a_max: most alternatives and asked ids of a request.
        needs_processed: a mode other than raw is asked.
    """

    k: Tensor
    modes: Tensor
    asked_ids: Tensor
    cu_asked: Tensor
    k_max: int
    a_max: int
    needs_processed: bool


class ProcessedRows(NamedTuple):
    """How rows were sampled: for the temperature and processed modes.

    Attributes:
        logits: [num_rows, V_padded] after penalties, bias and masks, before temperature.
        temperature: [num_rows] fp32.
        keep_threshold, tie_id: [num_rows] fp32, int64 of `SampledRows`.
    """

    logits: Tensor
    temperature: Tensor
    keep_threshold: Tensor
    tie_id: Tensor


def logprob_spec(
    params: Sequence[LogprobParams | None],
    *,
    prompt: bool = False,
    device: torch.device | str = "cpu",
) -> LogprobSpec:
    """Pack the wishes of bs requests; `None` wants nothing. `prompt`: entries of prompt tokens.

    Prompt entries are always raw, whatever mode the output has: their sampling never happened.
    Equal wishes share their tensors, which nobody modifies: most steps ask what the last one did.
    """
    return _spec(tuple([_wish(p, prompt) for p in params]), device)


def compute_spec_v2_logprobs(
    logits: Tensor,
    verdict_token_ids: Tensor,
    row_index: Tensor,
    num_tokens: Tensor,
    *,
    vocab_size: int,
    spec: LogprobSpec,
    processed: ProcessedRows | None,
) -> LogprobOutput:
    """Logprobs of emitted tokens in every asked mode, with alternatives, ranks and entropies.

    raw: log-softmax of the model's logits over the real vocabulary. temperature: of the edited
    logits divided by T (T = 0 counts as 1). processed: of what the filters kept, renormalised; at
    T = 0 it equals temperature. A filtered or impossible (-inf) token has nan, and is in no list.
    A slot's answers depend on its own row and question alone, to the bit.

    Args:
        logits: [num_rows, V_padded] bf16/fp16/fp32 raw target logits, not modified.
        verdict_token_ids, row_index: [bs, D] int64 emitted tokens and the rows that made them.
        num_tokens: [bs] int32 emitted tokens per request; further slots are invalid.
        vocab_size: real vocabulary; columns from there on are padding and are not read.
        processed: needed when `spec.needs_processed`.
    """
    batch_size = verdict_token_ids.shape[0]
    assert spec.k.shape == (batch_size,), f"{tuple(spec.k.shape)} wishes, {batch_size} requests"
    assert logits.shape[1] >= vocab_size, f"{logits.shape[1]} columns, vocabulary {vocab_size}"
    assert processed is not None or not spec.needs_processed, "processed rows are needed"
    questions = SlotQuestions(
        token_ids=verdict_token_ids,
        row_index=row_index,
        num_tokens=num_tokens,
        k=spec.k,
        modes=spec.modes,
        asked_ids=spec.asked_ids,
        cu_asked=spec.cu_asked,
    )
    edited = None
    if processed is not None and spec.needs_processed:
        edited = EditedRows(
            processed.logits, processed.temperature, processed.keep_threshold, processed.tie_id
        )
    return answer_slots(logits, vocab_size, questions, edited, k_max=spec.k_max, a_max=spec.a_max)


class _Wish(NamedTuple):
    """What one request wants, hashable whatever sequences it was given as."""

    k: int = 0
    modes: tuple[LogprobMode, ...] = ()
    token_ids: tuple[int, ...] = ()


def _wish(params: LogprobParams | None, prompt: bool) -> _Wish:
    if params is None:
        return _Wish()
    if prompt:
        return _Wish(params.prompt_top_k, ("raw",), tuple(params.token_ids))
    return _Wish(params.top_k, tuple(params.modes), tuple(params.token_ids))


@lru_cache(maxsize=16)
def _spec(wishes: tuple[_Wish, ...], device: torch.device | str) -> LogprobSpec:
    def packed(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    num_modes = max((len(wish.modes) for wish in wishes), default=0)
    modes = [
        code
        for wish in wishes
        for code in [*map(LOGPROB_MODES.index, wish.modes), *[NO_MODE] * num_modes][:num_modes]
    ]
    counts = [len(wish.token_ids) for wish in wishes]
    return LogprobSpec(
        k=packed([wish.k for wish in wishes], torch.int32),
        modes=packed(modes, torch.int8).view(len(wishes), num_modes),
        asked_ids=packed([i for wish in wishes for i in wish.token_ids], torch.int64),
        cu_asked=packed([0, *accumulate(counts)], torch.int32),
        k_max=max((wish.k for wish in wishes), default=0),
        a_max=max(counts, default=0),
        needs_processed=any(code > 0 for code in modes),
    )
