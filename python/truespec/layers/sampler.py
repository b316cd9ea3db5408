"""The sampler: a pure function of logits, parameters, seed and position.

Knows rows of logits and per-row parameters; knows no request, batch or draft. Verification runs
this very function on every row, which is what makes speculation lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from truespec.kernels.noise import signed64
from truespec.kernels.sampling import choose_tokens
from truespec.kernels.sampling_draft import choose_drafts, choose_top_k_drafts
from truespec.params import SamplingParams


class SamplingRows(NamedTuple):
    """How to choose the token of each row.

    Attributes:
        temperature: [n] fp32, 0 is argmax and filters do not act.
        top_k: [n] int32, 0 keeps all.
        top_p: [n] fp64, 1 keeps all. fp64 because 0.1 of ten equal tokens must be one of them.
        log_min_p: [n] fp64 natural logarithm of min-p, -inf keeps all.
        seed: [n] int64, the 64 bits of the seed in two's complement.
        position: [n] int64 absolute position of the token being chosen (a row's own position + 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seed: Tensor
    position: Tensor


class SampledRows(NamedTuple):
    """The token of each row and the set it was chosen from.

    A token is kept if its logit > keep_threshold, or == keep_threshold and its id <= tie_id.

    Attributes:
        token_ids: [n] int64, -1 where failed.
        failed: [n] bool: NaN or +inf in the row, or nothing left to choose from.
        keep_threshold: [n] fp32, -inf where no filter acts.
        tie_id: [n] int64, -1 where no filter acts.
    """

    token_ids: Tensor
    failed: Tensor
    keep_threshold: Tensor
    tie_id: Tensor


def sampling_rows(
    params: Sequence[SamplingParams], num_rows: Sequence[int], positions: Tensor
) -> SamplingRows:
    """Per-row parameters of requests with `num_rows[i]` adjacent rows each.

    Equal parameters share their tensors but for the positions: do not modify them.

    Args:
        params: with their seed set.
        positions: [sum(num_rows)] int64 absolute position of the token each row chooses.
    """
    values = tuple([_values(p) for p in params])
    columns = _columns(values, tuple(num_rows), positions.device)
    return SamplingRows(*columns, position=positions)


def sample(logits: Tensor, rows: SamplingRows, vocab_size: int) -> SampledRows:
    """Choose one token per row: argmax of (l - max) / T + noise among what the filters keep.

    Filters in order: top-k, top-p (the crossing token kept), min-p; ties everywhere to the lowest
    id. A row's result depends on that row alone, to the bit.

    Args:
        logits: [n, V_padded] fp32/bf16/fp16 after `edit_logits`, not modified.
    """
    return SampledRows(
        *choose_tokens(
            logits,
            vocab_size,
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            log_min_p=rows.log_min_p,
            seed=rows.seed,
            position=rows.position,
        )
    )


def sample_draft(
    logits: Tensor,
    *,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    target_ids: Tensor | None = None,
    domain: int = 0,
) -> tuple[Tensor, Tensor]:
    """A drafter's choice per row, with the noise the target will use at that position.

    Args:
        logits: [n, DV] draft logits, DV the drafter's own (unpadded) vocabulary.
        temperature: [n] fp32. seed, position: [n] int64; position of the drafted token.
        target_ids: [DV] int64 target id of each draft id (d2t first), `None` if they are the same.
        domain: `kernels.noise.DOMAIN_DRAFT` in rejection mode, where drafts have their own stream.

    Returns:
        token_ids [n] int64 in target ids; logprobs [n] fp32 under softmax(logits / T) (T = 0 as 1).
        A row with a NaN proposes its first id with logprob -inf.
    """
    return choose_drafts(logits, temperature, seed, position, target_ids, domain)


def top_k_draft(
    logits: Tensor,
    k: int,
    *,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A tree drafter's k best children per row by perturbed logits, best first.

    Returns:
        token_ids [n, k] int64 in target ids; scores [n, k] fp32, the log-softmax of the perturbed
        logits (log q at T = 0): sum them along a path to score a node.
    """
    return choose_top_k_drafts(logits, temperature, seed, position, k, target_ids)


class _Values(NamedTuple):
    """What tells the rows of one request from others, by value."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


def _values(params: SamplingParams) -> _Values:
    assert params.seed is not None, "a request reaches the sampler with its seed set"
    return _Values(
        params.temperature, params.top_k, params.top_p, params.min_p, signed64(params.seed)
    )


@lru_cache(maxsize=64)
def _columns(
    values: tuple[_Values, ...], num_rows: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `SamplingRows` but the last: requests keep them from step to step."""
    rows = [one for one, count in zip(values, num_rows, strict=True) for _ in range(count)]

    def column(entries: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(entries, dtype=dtype, device=device)

    return (
        column([row.temperature for row in rows], torch.float32),
        column([row.top_k for row in rows], torch.int32),
        column([row.top_p for row in rows], torch.float64),
        column([row.min_p for row in rows], torch.float64).clamp_max(1.0).log(),
        column([row.seed for row in rows], torch.int64),
    )
