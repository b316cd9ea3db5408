"""Logprobs of whole batches: a float64 reference on random ones, bit-equality, chunks, memory."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from row_kernels import row_kernels
from truespec.kernels.rows import has_numba
from truespec.layers.sampler import SamplingRows, sample
from truespec.layers.utils.logprob import (
    LogprobOutput,
    LogprobSpec,
    ProcessedRows,
    compute_spec_v2_logprobs,
    logprob_spec,
)
from truespec.params import LOGPROB_MODES, LogprobParams

INF = math.inf


def _reference_row(
    x: Tensor, kept: Tensor, temperature: float, ids: list[int]
) -> tuple[list[float], list[int]]:
    """float64: logprobs of ids (nan where filtered), and the kept ids best first."""
    scaled = torch.where(kept & (x > -INF), x.double() / temperature, -INF)
    logprobs = scaled.log_softmax(-1)
    values = [logprobs[i].item() if scaled[i] > -INF else math.nan for i in ids]
    order = sorted((i for i in range(len(x)) if scaled[i] > -INF), key=lambda i: (-x[i].item(), i))
    return values, order


def _assert_close(ours: list[float], expected: list[float]) -> None:
    assert [math.isnan(v) for v in ours] == [math.isnan(v) for v in expected]
    assert [v for v in ours if v == v] == pytest.approx([v for v in expected if v == v], abs=2e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_batches_equal_a_float64_reference_on_every_valid_slot(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch_size, width, vocab_size = rng.randint(1, 4), rng.randint(1, 5), rng.choice([3, 40, 300])
    num_rows = batch_size * width + rng.randint(0, 3)
    raw = (torch.randn(num_rows, vocab_size + 2, generator=generator) * 4).round(decimals=1)
    is_edited = torch.rand(raw.shape, generator=generator) < 0.2
    edited = torch.where(is_edited, raw - rng.choice([1.0, INF]), raw)
    edited[:, 0] = 0.3
    rows = SamplingRows(
        temperature=torch.tensor([rng.choice([0.0, 0.5, 2.0]) for _ in range(num_rows)]),
        top_k=torch.tensor([rng.choice([0, 1, 7]) for _ in range(num_rows)], dtype=torch.int32),
        top_p=torch.tensor([rng.choice([1.0, 0.6]) for _ in range(num_rows)], dtype=torch.float64),
        log_min_p=torch.full((num_rows,), -torch.inf, dtype=torch.float64),
        seed=torch.zeros(num_rows, dtype=torch.int64),
        position=torch.arange(num_rows),
    )
    wishes = [
        None
        if rng.random() < 0.2
        else LogprobParams(
            top_k=rng.choice([0, 1, 5, 20]),
            token_ids=tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))),
            modes=tuple(rng.sample(LOGPROB_MODES, rng.randint(1, 3))),
        )
        for _ in range(batch_size)
    ]
    # Paths of trees: any increasing rows, each row at most once.
    row_index = torch.randperm(num_rows, generator=generator)[: batch_size * width]
    row_index = row_index.view(batch_size, width).sort(1).values
    num_tokens = torch.tensor([rng.randint(0, width) for _ in range(batch_size)], dtype=torch.int32)
    sampled = sample(edited, rows, vocab_size)
    processed = ProcessedRows(edited, rows.temperature, sampled.keep_threshold, sampled.tie_id)
    token_ids = sampled.token_ids[row_index]
    is_valid = torch.arange(width) < num_tokens[:, None]
    answers = []
    for name in ("torch", "numba") if has_numba() else ("torch",):
        with row_kernels(name):
            answers.append(
                compute_spec_v2_logprobs(
                    raw,
                    torch.where(is_valid, token_ids, -1),
                    torch.where(is_valid, row_index, -1),
                    num_tokens,
                    vocab_size=vocab_size,
                    spec=logprob_spec(wishes),
                    processed=processed,
                )
            )
    for output in answers:
        _check_batch(output, wishes, raw[:, :vocab_size], processed, token_ids, row_index, is_valid)


def _check_batch(
    output: LogprobOutput,
    wishes: list[LogprobParams | None],
    raw: Tensor,
    processed: ProcessedRows,
    token_ids: Tensor,
    row_index: Tensor,
    is_valid: Tensor,
) -> None:
    host = output.to_host()
    ids = torch.arange(raw.shape[1])
    for i, wish in enumerate(wishes):
        for j in range(is_valid.shape[1]):
            modes = wish.modes if wish is not None and is_valid[i, j] else ()
            for m in range(output.chosen.shape[0]):
                if m >= len(modes):
                    assert math.isnan(host.chosen[m][i][j])
                    assert all(t == -1 for t in host.top_ids[m][i][j])
                    assert all(math.isnan(v) for v in host.top_values[m][i][j])
                    assert all(math.isnan(v) for v in host.asked[m][i][j])
                    continue
                assert wish is not None
                row, token = int(row_index[i, j]), int(token_ids[i, j])
                x = raw[row] if modes[m] == "raw" else processed.logits[row, : len(ids)]
                t = float(processed.temperature[row]) if modes[m] != "raw" else 1.0
                threshold, tie = processed.keep_threshold[row], processed.tie_id[row]
                kept = (x > threshold) | ((x == threshold) & (ids <= tie))
                if modes[m] != "processed":
                    kept = torch.ones_like(kept)
                values, order = _reference_row(x, kept, t or 1.0, [token, *wish.token_ids])
                pad = output.asked.shape[3] - len(wish.token_ids)
                _assert_close([host.chosen[m][i][j]], values[:1])
                _assert_close(host.asked[m][i][j], values[1:] + [math.nan] * pad)
                best = order[: wish.top_k]
                pad = output.top_ids.shape[3] - len(best)
                assert host.top_ids[m][i][j] == best + [-1] * pad
                expected, _ = _reference_row(x, kept, t or 1.0, best)
                _assert_close(host.top_values[m][i][j], expected + [math.nan] * pad)
            if modes:
                row, token = int(row_index[i, j]), int(token_ids[i, j])
                assert host.rank[i][j] == 1 + int((raw[row] > raw[row, token]).sum())
            else:
                assert host.rank[i][j] == 0
                assert math.isnan(host.entropy[i][j])


def _all_rows(logits: Tensor, tokens: Tensor, spec: LogprobSpec) -> LogprobOutput:
    """One request per row, as plain decoding and prompt scoring ask."""
    n, vocab_size = logits.shape
    return compute_spec_v2_logprobs(
        logits,
        tokens[:, None],
        torch.arange(n)[:, None],
        torch.ones(n, dtype=torch.int32),
        vocab_size=vocab_size,
        spec=spec,
        processed=None,
    )


@pytest.mark.skipif(not has_numba(), reason="the bit-equal mode is numba's")
def test_a_rows_answers_are_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(70, 49152, generator=torch.Generator().manual_seed(5)) * 3
    tokens = logits[:, :100].argmax(-1)
    whole = _all_rows(logits, tokens, logprob_spec([LogprobParams(top_k=5)] * 70))  # on threads
    for row in (0, 33, 69):
        alone = _all_rows(
            logits[row : row + 1], tokens[row : row + 1], logprob_spec([LogprobParams(top_k=5)])
        )
        for name in ("chosen", "top_ids", "top_values"):
            one, two = getattr(alone, name)[:, 0], getattr(whole, name)[:, row]
            assert torch.equal(one.view(torch.int32), two.view(torch.int32)), name
        assert alone.entropy.view(torch.int32)[0] == whole.entropy.view(torch.int32)[row]


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_x08_a_prompt_scored_in_chunks_has_the_same_values(kernels: str) -> None:
    if kernels == "numba" and not has_numba():
        pytest.skip("numba is not installed")
    num_rows, vocab_size = 96, 32000
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(6))
    tokens = torch.arange(num_rows) * 7
    answers = []
    for chunk in (1, 7, num_rows):
        parts = []
        for begin in range(0, num_rows, chunk):
            part = slice(begin, begin + chunk)
            spec = logprob_spec(
                [LogprobParams(prompt_top_k=2, start=0)] * len(tokens[part]), prompt=True
            )
            with row_kernels(kernels):
                parts.append(_all_rows(logits[part], tokens[part], spec).chosen)
        answers.append(torch.cat(parts, dim=1))
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])
    for answer in answers:
        assert torch.allclose(answer[0].double(), expected, atol=2e-5)


def _memory(what: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {what}")


@pytest.mark.skipif(not has_numba(), reason="the reference trades memory for plainness")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_x08_extra_memory_is_a_small_part_of_the_logits() -> None:
    logits = torch.randn(64, 151936, generator=torch.Generator().manual_seed(7))
    spec = logprob_spec([LogprobParams(top_k=20)] * 64)
    tokens = torch.zeros(64, dtype=torch.int64)
    _all_rows(logits, tokens, spec)  # compiles, starts threads
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    output = _all_rows(logits, tokens, spec)
    extra = _memory("VmHWM") - before
    assert output.chosen.shape == (1, 64, 1)
    assert extra < 0.02 * logits.numel() * logits.element_size()
