"""Logprobs of emitted tokens from logits, without a table of them. Wrapper and torch reference.

Knows rows, slots and packed questions; the kernel is `logprob_numba.py`. A slot is one emitted
token; its answers depend on its own row and question alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .logprob_output import AnswerParts, LogprobOutput, answer_parts, empty_output, part_ends
from .rows import flat_fp32, is_direct, run_row_ranges, use_numba
from .sampling import MIN_TEMPERATURE, is_kept

RAW, TEMPERATURE, PROCESSED = range(3)  # mode codes; -1 is none
_REFERENCE_ELEMENTS = 2**20
_WIDENED_SLOTS = 8  # bf16 and fp16 rows are widened so many at a time

Array = NDArray[np.generic]

_NO_FLOATS: Array = np.empty(0, np.float32)
_NO_ROWS = (_NO_FLOATS, 0)
_NO_FILTERS: tuple[Array, ...] = (_NO_FLOATS, _NO_FLOATS, np.empty(0, np.int64))


class SlotQuestions(NamedTuple):
    """What is asked of S = bs * D slots, D for each of bs requests.

    Attributes:
        token_ids, row_index: [bs, D] int64. num_tokens: [bs] int32, further slots are invalid.
        k: [bs] int32 best tokens per slot. modes: [bs, M] int8 mode codes.
        asked_ids: [num_asked] int64; cu_asked: [bs + 1] int32 their offsets.
    """

    token_ids: Tensor
    row_index: Tensor
    num_tokens: Tensor
    k: Tensor
    modes: Tensor
    asked_ids: Tensor
    cu_asked: Tensor


class EditedRows(NamedTuple):
    """Rows of the temperature and processed modes: logits [n, V] and [n] parameters of each row."""

    logits: Tensor
    temperature: Tensor
    keep_threshold: Tensor
    tie_id: Tensor


def answer_slots(
    logits: Tensor,
    vocab_size: int,
    questions: SlotQuestions,
    edited: EditedRows | None,
    *,
    k_max: int,
    a_max: int,
) -> LogprobOutput:
    """Answers to every slot. `edited` is needed when a mode other than raw is asked.

    Args:
        logits: [num_rows, >= vocab_size] fp32/bf16/fp16 raw logits, not modified.
        k_max, a_max: most best tokens and asked ids of a request.
    """
    num_slots = questions.token_ids.numel()
    shape = (questions.modes.shape[1], *questions.token_ids.shape)
    output = empty_output(shape, k_max, a_max, logits.device)
    if use_numba(logits.device):
        is_copied = not (is_direct(logits) and (edited is None or is_direct(edited.logits)))
        step = max(1, _WIDENED_SLOTS if is_copied else num_slots)
        for begin in range(0, num_slots, step):
            end = min(num_slots, begin + step)
            _answer_numba(logits, vocab_size, questions, edited, output, begin, end)
        return output
    answers = _cleared_parts(output)
    step = max(1, _REFERENCE_ELEMENTS // vocab_size)
    for begin in range(0, num_slots, step):
        end = min(num_slots, begin + step)
        _answer_reference(logits, vocab_size, questions, edited, answers, begin, end)
    return output


def _answer_numba(
    logits: Tensor,
    vocab_size: int,
    questions: SlotQuestions,
    edited: EditedRows | None,
    output: LogprobOutput,
    begin: int,
    end: int,
) -> None:
    q = questions
    tokens, rows, counts = _arrays(q.token_ids, q.row_index, q.num_tokens)
    ask = _arrays(q.k, q.asked_ids, q.cu_asked, q.modes)
    raw, raw_rows = _flat(logits, rows, begin, end)
    second, second_rows, filters = _NO_ROWS, rows, _NO_FILTERS
    if edited is not None:
        second, second_rows = _flat(edited.logits, rows, begin, end)
        filters = _arrays(edited.temperature, edited.keep_threshold, edited.tie_id)
    slots = (tokens, raw_rows, second_rows, rows, counts)
    ints = output.buffer.numpy()
    ends = part_ends(output.shape, output.k_max, output.a_max)
    out = (ints, ints.view(np.float32), ends, output.k_max, output.a_max)
    args = (raw, second, slots, vocab_size, ask, filters, out)
    run_row_ranges(_kernel(), begin, end, vocab_size, args)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    from .logprob_numba import logprob_slots

    return logprob_slots


def _flat(logits: Tensor, rows: Array, begin: int, end: int) -> tuple[tuple[Array, int], Array]:
    """Flat fp32 logits of slots begin .. end - 1 with their row distance, each slot's row there."""
    if is_direct(logits):
        return flat_fp32(logits), rows
    wanted = torch.from_numpy(rows[begin:end].clip(0))
    return flat_fp32(logits[wanted]), np.arange(-begin, len(rows) - begin)


def _arrays(*tensors: Tensor) -> tuple[Array, ...]:
    """Flat and contiguous: another layout would compile the kernel again."""
    return tuple([tensor.numpy().reshape(-1) for tensor in tensors])


def _cleared_parts(output: LogprobOutput) -> AnswerParts[Tensor]:
    """Fillers everywhere; the parts have one axis for all slots."""
    floats = output.buffer.view(torch.float32).fill_(torch.nan)
    lead = (output.shape[0], output.shape[1] * output.shape[2])
    parts = answer_parts(output.buffer, floats, lead, output.k_max, output.a_max)
    parts.top_ids.fill_(-1)
    parts.rank.fill_(0)
    return parts


def _answer_reference(
    logits: Tensor,
    vocab_size: int,
    questions: SlotQuestions,
    edited: EditedRows | None,
    answers: AnswerParts[Tensor],
    begin: int,
    end: int,
) -> None:
    part = slice(begin, end)
    width = questions.token_ids.shape[1]
    slots = torch.arange(begin, end, device=logits.device)
    requests = slots // width
    token_ids = questions.token_ids.reshape(-1)[part].clamp_min(0)
    rows = questions.row_index.reshape(-1)[part].clamp_min(0)
    is_asked = slots % width < questions.num_tokens[requests]
    is_asked &= (questions.modes[requests] >= 0).any(-1)
    ask = _Ask(questions, requests, token_ids, is_asked)
    x = logits[rows, :vocab_size].to(torch.float32)
    stats = _Stats(x, torch.ones_like(x[:, 0]), torch.ones_like(x, dtype=torch.bool))
    is_asked &= stats.is_valid
    chosen_logit = x.gather(-1, token_ids.unsqueeze(-1))
    answers.rank[part] = torch.where(is_asked, 1 + (x > chosen_logit).sum(-1), 0).to(torch.int32)
    answers.entropy[part] = torch.where(is_asked, stats.entropy, torch.nan)
    _write_mode(stats, RAW, ask, answers, part)
    if edited is None:
        return
    x = edited.logits[rows, :vocab_size].to(torch.float32)
    temperature = edited.temperature[rows]
    temperature = torch.where(temperature < MIN_TEMPERATURE, 1.0, temperature)
    everything = torch.ones_like(x, dtype=torch.bool)
    _write_mode(_Stats(x, temperature, everything), TEMPERATURE, ask, answers, part)
    ids = torch.arange(vocab_size, device=x.device)
    kept = is_kept(x, ids, edited.keep_threshold[rows, None], edited.tie_id[rows, None])
    _write_mode(_Stats(x, temperature, kept), PROCESSED, ask, answers, part)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A block of slots: request, token and whether anything is asked of each, [s]."""

    questions: SlotQuestions
    requests: Tensor
    token_ids: Tensor
    is_asked: Tensor


class _Stats:
    """A block of rows under one distribution: logprobs of any ids, and the entropy."""

    def __init__(self, x: Tensor, temperature: Tensor, kept: Tensor) -> None:
        top = x.amax(-1, keepdim=True)
        self.is_valid = top.isfinite().squeeze(-1)
        self.x = x
        self.scaled = torch.where(
            kept & (x > -torch.inf), (x - top) / temperature[:, None], -torch.inf
        )
        e = self.scaled.to(torch.float64).exp()
        total = e.sum(-1)
        self.log_total = total.log()
        weighted = torch.where(e > 0, e * self.scaled.to(torch.float64), 0.0).sum(-1)
        self.entropy = (self.log_total - weighted / total).to(torch.float32)

    def logprobs(self, ids: Tensor) -> Tensor:
        """[s, c] logprobs of ids [s, c], nan where filtered or impossible."""
        values = self.scaled.gather(-1, ids).to(torch.float64) - self.log_total[:, None]
        return torch.where(values > -torch.inf, values, torch.nan).to(torch.float32)

    def best(self, k: int) -> Tensor:
        """[s, k] ids by (value descending, id ascending)."""
        bits = (self.x + 0.0).view(torch.int32)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
        ids = torch.arange(self.x.shape[1], device=self.x.device)
        codes = (~key << 32) | ids
        return torch.topk(codes, k, dim=-1, largest=False).values & 0xFFFFFFFF


def _write_mode(
    stats: _Stats, mode: int, ask: _Ask, answers: AnswerParts[Tensor], part: slice
) -> None:
    """Write the answers of one mode where a slot asks for it."""
    questions, requests = ask.questions, ask.requests
    is_mode = (questions.modes[requests] == mode) & ask.is_asked[:, None]  # [s, M]
    where = is_mode.t()  # [M, s]

    def put(out: Tensor, values: Tensor, mask: Tensor) -> None:
        out[:, part] = torch.where(mask, values.to(out.dtype), out[:, part])

    chosen = stats.logprobs(ask.token_ids[:, None])[:, 0]
    put(answers.chosen, chosen, where)
    k_max = answers.top_ids.shape[2]
    k_found = min(k_max, stats.x.shape[1])
    if k_found > 0:
        ids = stats.best(k_found)
        values = stats.logprobs(ids)
        has = torch.arange(k_found, device=ids.device) < questions.k[requests][:, None]
        has = where[:, :, None] & (has & ~values.isnan())
        put(answers.top_ids[:, :, :k_found], ids, has)
        put(answers.top_values[:, :, :k_found], values, has)
    a_max = answers.asked.shape[2]
    if a_max > 0:
        first = questions.cu_asked[requests].to(torch.int64)
        count = questions.cu_asked[requests + 1].to(torch.int64) - first
        j = torch.arange(a_max, device=first.device)
        has = j < count[:, None]
        last = questions.asked_ids.shape[0] - 1
        ids = questions.asked_ids[(first[:, None] + j).clamp_max(last)]
        has &= (ids >= 0) & (ids < stats.x.shape[1])
        values = stats.logprobs(torch.where(has, ids, 0))
        put(answers.asked, values, where[:, :, None] & has)
