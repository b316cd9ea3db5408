"""Logprobs of emitted tokens, each from the target row that produced it. Pure tensors.

Knows rows of logits, verdicts and packed questions; names nothing of who asks. No `[rows, vocab]`
table of logprobs is ever made: memory grows with emitted tokens times what is asked of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from truespec.kernels.logprob import EditedRows, SlotAnswers, SlotQuestions, answer_slots
from truespec.params import LOGPROB_MODES, LogprobParams

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


@dataclass(frozen=True, slots=True)
class ProcessedRows:
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


class HostLogprobs(NamedTuple):
    """A `LogprobOutput` as nested lists: the fields of `batch.LogprobTable` in its order.

    A float is nan where there is none (filtered, or an invalid slot); an id is -1.
    """

    chosen: list[list[list[float]]]
    top_ids: list[list[list[list[int]]]]
    top_values: list[list[list[list[float]]]]
    asked: list[list[list[list[float]]]]
    rank: list[list[int]]
    entropy: list[list[float]]


@dataclass(frozen=True, slots=True)
class LogprobOutput:
    """Answers, all in one buffer so that they leave the device in one copy.

    Attributes:
        buffer: [size] int32 behind all others; floats are kept as their bits.
        chosen: [M, bs, D] fp32 logprob of the emitted token; nan where filtered or invalid.
        top_ids: [M, bs, D, K] int32 best kept tokens, best first, ties to the lowest id; -1 pads.
        top_values: [M, bs, D, K] fp32 their logprobs; nan pads.
        asked: [M, bs, D, A] fp32 of the asked ids in their order; nan where filtered or none.
        rank: [bs, D] int32, 1 + tokens with a higher raw logit; 0 where nothing is asked.
        entropy: [bs, D] fp32 of the raw distribution in nats; nan where nothing is asked.
    """

    buffer: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor
    asked: Tensor
    rank: Tensor
    entropy: Tensor

    def to_host(self) -> HostLogprobs:
        """Everything as Python lists, after one device-to-host copy."""
        names = ("chosen", "top_ids", "top_values", "asked", "rank", "entropy")
        parts = [getattr(self, name) for name in names]
        host = self.buffer.cpu().numpy()
        ends = np.cumsum([part.numel() for part in parts])[:-1]
        lists = [
            flat.view(np.float32 if part.is_floating_point() else np.int32)
            .reshape(part.shape)
            .tolist()
            for flat, part in zip(np.split(host, ends), parts, strict=True)
        ]
        return HostLogprobs(*lists)


def logprob_spec(
    params: Sequence[LogprobParams | None],
    *,
    prompt: bool = False,
    device: torch.device | str = "cpu",
) -> LogprobSpec:
    """Pack the wishes of bs requests; `None` wants nothing. `prompt`: entries of prompt tokens.

    Prompt entries are always raw, whatever mode the output has: their sampling never happened.
    """
    k = [0 if p is None else (p.prompt_top_k if prompt else p.top_k) for p in params]
    modes = [_mode_codes(p, prompt) for p in params]
    asked = [() if p is None else p.token_ids for p in params]
    num_modes = max((len(m) for m in modes), default=0)
    counts = torch.tensor([0] + [len(a) for a in asked], dtype=torch.int32, device=device)
    padded = [m + [NO_MODE] * (num_modes - len(m)) for m in modes]
    return LogprobSpec(
        k=torch.tensor(k, dtype=torch.int32, device=device),
        modes=torch.tensor(padded, dtype=torch.int8, device=device).view(len(params), num_modes),
        asked_ids=torch.tensor([i for a in asked for i in a], dtype=torch.int64, device=device),
        cu_asked=counts.cumsum(0, dtype=torch.int32),
        k_max=max(k, default=0),
        a_max=max((len(a) for a in asked), default=0),
        needs_processed=any(code > 0 for m in modes for code in m),
    )


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
    batch_size, num_slots = verdict_token_ids.shape
    assert spec.k.shape == (batch_size,), f"{tuple(spec.k.shape)} wishes, {batch_size} requests"
    assert logits.shape[1] >= vocab_size, f"{logits.shape[1]} columns, vocabulary {vocab_size}"
    assert processed is not None or not spec.needs_processed, "processed rows are needed"
    output = _empty_output(batch_size, num_slots, spec, logits.device)
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
    answer_slots(logits, vocab_size, questions, edited, _answers(output))
    return output


def _mode_codes(params: LogprobParams | None, prompt: bool) -> list[int]:
    if params is None:
        return []
    if prompt:
        return [LOGPROB_MODES.index("raw")]
    return [LOGPROB_MODES.index(mode) for mode in params.modes]


def _empty_output(
    batch_size: int, width: int, spec: LogprobSpec, device: torch.device
) -> LogprobOutput:
    """All fillers: nan, rank 0, id -1."""
    num_modes, k_max, a_max = spec.modes.shape[1], spec.k_max, spec.a_max
    slots = batch_size * width
    values = num_modes * slots
    sizes = [values, values * k_max, values * k_max, values * a_max, slots, slots]
    buffer = torch.full((sum(sizes),), torch.nan, device=device)
    chosen, top_ids, top_values, asked, rank, entropy = buffer.split_with_sizes(sizes)
    shape = (num_modes, batch_size, width)
    return LogprobOutput(
        buffer=buffer.view(torch.int32),
        chosen=chosen.view(shape),
        top_ids=top_ids.view(torch.int32).fill_(-1).view(*shape, k_max),
        top_values=top_values.view(*shape, k_max),
        asked=asked.view(*shape, a_max),
        rank=rank.view(torch.int32).fill_(0).view(shape[1:]),
        entropy=entropy.view(shape[1:]),
    )


def _answers(output: LogprobOutput) -> SlotAnswers:
    """The output's parts with requests and slots flattened into one axis."""
    return SlotAnswers(
        chosen=output.chosen.flatten(1, 2),
        top_ids=output.top_ids.flatten(1, 2),
        top_values=output.top_values.flatten(1, 2),
        asked=output.asked.flatten(1, 2),
        rank=output.rank.flatten(),
        entropy=output.entropy.flatten(),
    )
