"""Logprobs of emitted tokens, each from the target row that produced it. Pure tensors.

Knows rows of logits, verdicts and packed questions; names nothing of who asks. No `[rows, vocab]`
table of logprobs is ever made: memory grows with emitted tokens times what is asked of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """Answers in one buffer, so that they leave the device in one copy.

    Attributes:
        buffer: [size] int32; floats are kept as their bits.
        num_modes, batch_size, num_slots, k_max, a_max: M, bs, D, K, A of the shapes below.
    """

    buffer: Tensor
    num_modes: int
    batch_size: int
    num_slots: int
    k_max: int
    a_max: int

    @property
    def chosen(self) -> Tensor:
        """[M, bs, D] fp32 logprob of the emitted token, nan where filtered or invalid."""
        return self._part(0).view(torch.float32)

    @property
    def top_ids(self) -> Tensor:
        """[M, bs, D, K] int32 best kept tokens, best first, ties to the lowest id; -1 pads."""
        return self._part(1)

    @property
    def top_values(self) -> Tensor:
        """[M, bs, D, K] fp32 their logprobs; nan pads."""
        return self._part(2).view(torch.float32)

    @property
    def asked(self) -> Tensor:
        """[M, bs, D, A] fp32 of the asked ids in their order; nan where filtered or none."""
        return self._part(3).view(torch.float32)

    @property
    def rank(self) -> Tensor:
        """[bs, D] int32, 1 + tokens with a higher raw logit; 0 where invalid or nothing asked."""
        return self._part(4)

    @property
    def entropy(self) -> Tensor:
        """[bs, D] fp32 of the raw distribution in nats; nan where invalid or nothing asked."""
        return self._part(5).view(torch.float32)

    def to_host(self) -> HostLogprobs:
        """Everything as Python lists, after one device-to-host copy."""
        host = LogprobOutput(
            self.buffer.cpu(),
            self.num_modes,
            self.batch_size,
            self.num_slots,
            self.k_max,
            self.a_max,
        )
        return HostLogprobs(
            host.chosen.tolist(),
            host.top_ids.tolist(),
            host.top_values.tolist(),
            host.asked.tolist(),
            host.rank.tolist(),
            host.entropy.tolist(),
        )

    def _part(self, index: int) -> Tensor:
        slots = (self.batch_size, self.num_slots)
        shapes = _shapes(self.num_modes, slots, self.k_max, self.a_max)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        start = sum(sizes[:index])
        return self.buffer[start : start + sizes[index]].view(shapes[index])


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
    device = logits.device
    slot = torch.arange(num_slots, device=device)
    is_valid = slot < num_tokens[:, None]
    requests = torch.arange(batch_size, device=device).repeat_interleave(num_slots)
    questions = SlotQuestions(
        token_ids=torch.where(is_valid, verdict_token_ids, -1).view(-1),
        row_index=row_index.reshape(-1),
        requests=requests,
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


def _shapes(
    num_modes: int, slots: tuple[int, ...], k_max: int, a_max: int
) -> tuple[tuple[int, ...], ...]:
    """Shapes of chosen, top ids, top values, asked, rank, entropy."""
    by_mode = (num_modes, *slots)
    return (by_mode, (*by_mode, k_max), (*by_mode, k_max), (*by_mode, a_max), slots, slots)


def _empty_output(
    batch_size: int, num_slots: int, spec: LogprobSpec, device: torch.device
) -> LogprobOutput:
    """All fillers: nan, rank 0, id -1."""
    num_modes = spec.modes.shape[1]
    shapes = _shapes(num_modes, (batch_size, num_slots), spec.k_max, spec.a_max)
    size = sum(torch.Size(shape).numel() for shape in shapes)
    buffer = torch.full((size,), torch.nan, device=device).view(torch.int32)
    output = LogprobOutput(buffer, num_modes, batch_size, num_slots, spec.k_max, spec.a_max)
    output.top_ids.fill_(-1)
    output.rank.fill_(0)
    return output


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
