"""Logprobs of emitted tokens against float64 log-softmaxes; every value from its own row."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from row_kernels import row_kernels
from truespec.kernels.rows import has_numba
from truespec.layers.sampler import SamplingRows, sample
from truespec.layers.utils.logprob import (
    LogprobOutput,
    ProcessedRows,
    compute_spec_v2_logprobs,
    logprob_spec,
)
from truespec.params import LOGPROB_MODES, LogprobMode, LogprobParams

INF = math.inf
KERNELS = [
    "torch",
    pytest.param("numba", marks=pytest.mark.skipif(not has_numba(), reason="no numba")),
]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with row_kernels(request.param):
        yield str(request.param)


def _sampling_rows(
    num_rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64),
        log_min_p=torch.full((num_rows,), -torch.inf, dtype=torch.float64),
        seed=torch.zeros(num_rows, dtype=torch.int64),
        position=torch.arange(num_rows),
    )


def _processed(edited: Tensor, rows: SamplingRows, vocab_size: int) -> ProcessedRows:
    sampled = sample(edited, rows, vocab_size)
    return ProcessedRows(edited, rows.temperature, sampled.keep_threshold, sampled.tie_id)


def _ask(
    logits: list[list[float]] | Tensor,
    chosen: list[int],
    wish: LogprobParams,
    *,
    temperature: float = 1.0,
    edited: Tensor | None = None,
) -> LogprobOutput:
    """Chosen token of each row, as one request whose step emitted them all."""
    raw = torch.as_tensor(logits)
    n, vocab_size = raw.shape
    edited = raw if edited is None else edited
    return compute_spec_v2_logprobs(
        raw,
        torch.tensor([chosen]),
        torch.arange(n)[None],
        torch.tensor([n], dtype=torch.int32),
        vocab_size=vocab_size,
        spec=logprob_spec([wish]),
        processed=_processed(edited, _sampling_rows(n, temperature), vocab_size),
    )


def _wish(*modes: LogprobMode, top_k: int = 0, token_ids: tuple[int, ...] = ()) -> LogprobParams:
    return LogprobParams(top_k=top_k, modes=modes or ("raw",), token_ids=token_ids)


def _approx(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-5)


R0, R1, R2 = [0.0, 2, 1, 0], [3.0, 0, 1, 0], [0.0, 0, 0, 5]


def _step(tokens: list[int], rows: list[int]) -> list[float]:
    output = compute_spec_v2_logprobs(
        torch.tensor([R0, R1, R2]),
        torch.tensor([tokens]),
        torch.tensor([rows]),
        torch.tensor([sum(t >= 0 for t in tokens)], dtype=torch.int32),
        vocab_size=4,
        spec=logprob_spec([_wish()]),
        processed=None,
    )
    return output.to_host().chosen[0][0]


def test_b01_the_correction_has_the_logprob_of_the_row_that_refused(kernels: str) -> None:
    values = _step([1, 0, -1], [0, 1, -1])
    assert values[:2] == _approx([-0.493812, -0.210998])
    assert math.isnan(values[2])


def test_b02_drafts_and_bonus_have_the_logprobs_of_their_rows(kernels: str) -> None:
    assert _step([1, 0, 3], [0, 1, 2]) == _approx([-0.493812, -0.210998, -0.020012])


def test_b05_every_emitted_token_has_one_entry_and_the_first_is_its_rows(kernels: str) -> None:
    logits = torch.randn(16, 33, generator=torch.Generator().manual_seed(0))
    for n in (1, 2, 16):
        tokens = logits[:n].argmax(-1).tolist()
        values = _ask(logits[:n], tokens, _wish()).to_host().chosen[0][0]
        expected = logits[:n].double().log_softmax(-1).amax(-1).tolist()
        assert values == _approx(expected)


def test_b06_an_accepted_draft_has_its_real_logprob(kernels: str) -> None:
    assert _ask([[1.0, 0.0]], [0], _wish()).to_host().chosen[0][0] == _approx([-0.313262])


def test_b07_a_step_cut_to_two_tokens_has_the_entries_of_two(kernels: str) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    args = (logits, torch.tensor([[1, 2, 3, 4]]), torch.arange(4)[None])
    whole, cut = (
        compute_spec_v2_logprobs(
            *args,
            torch.tensor([n], dtype=torch.int32),
            vocab_size=9,
            spec=logprob_spec([_wish(top_k=2)]),
            processed=None,
        )
        for n in (4, 2)
    )
    assert torch.equal(cut.chosen[:, :, :2], whole.chosen[:, :, :2])
    assert cut.chosen[:, :, 2:].isnan().all()
    assert (cut.top_ids[:, :, 2:] == -1).all()


def test_b16_processed_divides_by_temperature_and_renormalises(kernels: str) -> None:
    output = _ask([[2.0, 1.0, 0.0]], [1], _wish("raw", "processed"), temperature=0.5)
    chosen = output.to_host().chosen
    assert [chosen[0][0][0], chosen[1][0][0]] == _approx([-1.407606, -2.142932])


def test_b18_greedy_rows_report_real_values_in_every_mode(kernels: str) -> None:
    host = _ask([[1.0, 0.0]], [0], _wish(*LOGPROB_MODES, top_k=2), temperature=0.0).to_host()
    for mode in range(3):
        assert host.chosen[mode][0] == _approx([-0.313262])
        assert host.top_ids[mode][0] == [[0, 1]]
        assert host.top_values[mode][0][0] == _approx([-0.313262, -1.313262])


def test_b19_raw_values_are_of_the_logits_before_the_bias(kernels: str) -> None:
    raw = torch.tensor([[1.0, 0.0, 2.0]])
    before = raw.clone()
    edited = raw + torch.tensor([0.0, 0.0, -50.0])
    wish = _wish("raw", "processed", token_ids=(0, 1, 2))
    host = _ask(raw, [0], wish, temperature=2.0, edited=edited).to_host()
    assert host.asked[0][0][0] == _approx([-1.407606, -2.407606, -0.407606])
    assert host.asked[1][0][0] == _approx([-0.474077, -0.974077, -24.974077])
    assert torch.equal(raw, before)


def test_b22_processed_values_follow_the_penalties_of_each_row(kernels: str) -> None:
    raw = torch.tensor([[1.0, 0.9], [1.0, 0.9]])
    edited = torch.tensor([[1.0, 0.9], [0.5, 0.9]])
    host = _ask(raw, [0, 1], _wish("raw", "processed"), temperature=0.0, edited=edited).to_host()
    assert host.chosen[0][0] == _approx([-0.644397, -0.744397])
    assert host.chosen[1][0] == _approx([-0.644397, -0.513015])


@pytest.mark.parametrize("stride", [0, 6])
def test_b26_rows_beyond_two_to_the_31_elements_read_their_own_row(
    kernels: str, stride: int
) -> None:
    """15,408 rows of 151,936: an expanded view stands for rows that are far apart."""
    vocab_size, num_rows = 151936, 15408
    base = torch.randn(vocab_size + 6 * num_rows, generator=torch.Generator().manual_seed(2))
    logits = base.as_strided((num_rows, vocab_size), (stride, 1))
    rows = torch.tensor([[0, 14134, 14135, num_rows - 1]])
    output = compute_spec_v2_logprobs(
        logits,
        torch.full((1, 4), 777),
        rows,
        torch.tensor([4], dtype=torch.int32),
        vocab_size=vocab_size,
        spec=logprob_spec([_wish()]),
        processed=None,
    )
    expected = [logits[int(r)].double().log_softmax(-1)[777].item() for r in rows[0]]
    assert output.chosen[0, 0].tolist() == _approx(expected)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_b26_offsets_of_far_rows_are_64_bit() -> None:
    """Row 2 at a distance of 2^31 lies outside; in 32 bits its offset would be row 0's."""
    from truespec.kernels.logprob_numba import _row

    flat = np.arange(8, dtype=np.float32)
    assert _row((flat, 4), np.int32(1), 4).tolist() == [4.0, 5.0, 6.0, 7.0]
    assert _row((flat, 2**31), np.int32(2), 4).tolist() == []


def test_b28_ten_equal_bf16_logits_give_the_fp32_answer(kernels: str) -> None:
    logits = torch.full((1, 10), 3.0, dtype=torch.bfloat16)
    assert _ask(logits, [4], _wish()).chosen[0, 0].tolist() == _approx([-2.302585])


def test_b28_half_precision_rows_equal_their_widened_rows(kernels: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        logits = torch.randn(20, 515, generator=torch.Generator().manual_seed(3)).to(dtype)
        wish = _wish(*LOGPROB_MODES, top_k=3, token_ids=(4,))
        one, two = (_ask(x, [7] * 20, wish) for x in (logits, logits.float()))
        assert torch.equal(one.buffer, two.buffer)


def test_b29_alternatives_are_k_best_and_the_chosen_token_stands_apart(kernels: str) -> None:
    logits = [[3.0, 2.0, 1.0, 0.0]]
    host = _ask(logits, [0], _wish(top_k=2)).to_host()
    assert host.top_ids == [[[[0, 1]]]]
    host = _ask(logits, [3], _wish(top_k=2)).to_host()
    assert host.top_ids == [[[[0, 1]]]]
    assert host.chosen[0][0] == _approx([-3.440190])
    assert host.rank == [[4]]
    assert _ask(logits, [0], _wish()).to_host().top_ids == [[[[]]]]
    assert _ask(logits, [0], _wish(top_k=4)).to_host().top_ids == [[[[0, 1, 2, 3]]]]


def test_more_alternatives_than_tokens_are_padded(kernels: str) -> None:
    host = _ask([[1.0, 5.0, -INF]], [0], _wish(top_k=5)).to_host()
    assert host.top_ids[0][0] == [[1, 0, -1, -1, -1]]
    assert all(math.isnan(v) for v in host.top_values[0][0][0][2:])


def test_equal_alternatives_come_in_order_of_their_ids(kernels: str) -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 900:] = 1.0
    host = _ask(logits, [0], _wish(top_k=150)).to_host()
    assert host.top_ids[0][0][0] == [*range(900, 1000), *range(50)]
    assert host.rank == [[101]]


def test_filtered_tokens_have_no_processed_value_and_are_in_no_list(kernels: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -INF]])
    sampled = sample(logits, _sampling_rows(1, 1.0, top_k=2), 4)
    output = compute_spec_v2_logprobs(
        logits,
        torch.tensor([[1]]),
        torch.tensor([[0]]),
        torch.tensor([1], dtype=torch.int32),
        vocab_size=4,
        spec=logprob_spec([_wish(*LOGPROB_MODES, top_k=4, token_ids=(2, 3, 0))]),
        processed=ProcessedRows(logits, torch.ones(1), sampled.keep_threshold, sampled.tie_id),
    )
    host = output.to_host()
    assert host.top_ids[2][0][0] == [0, 1, -1, -1]
    assert host.top_ids[1][0][0] == [0, 1, 2, -1]
    assert host.chosen[2][0] == _approx([math.log(1 / (1 + math.e))])
    assert [math.isnan(v) for v in host.asked[2][0][0]] == [True, True, False]
    assert [math.isnan(v) for v in host.asked[0][0][0]] == [False, True, False]


def test_entropy_is_of_the_raw_distribution(kernels: str) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(4)) * 4
    logits[1] = 0.0
    logits[2, 1:] = -INF
    output = _ask(logits, [0, 0, 0], _wish())
    p = logits.double().softmax(-1)
    expected = torch.special.entr(p).sum(-1)
    assert output.entropy[0].tolist() == _approx(expected.tolist())
    assert output.entropy[0, 1].item() == pytest.approx(math.log(700), abs=1e-5)


def test_prompt_entries_are_raw_and_take_their_own_width() -> None:
    wish = LogprobParams(top_k=1, prompt_top_k=3, modes=("processed", "raw"), token_ids=(5,))
    spec = logprob_spec([wish, None], prompt=True)
    assert spec.k.tolist() == [3, 0]
    assert spec.modes.tolist() == [[0], [-1]]
    assert not spec.needs_processed
    assert logprob_spec([wish]).needs_processed


def test_wishes_given_as_lists_are_packed_like_tuples() -> None:
    as_lists = LogprobParams(modes=["temperature", "raw"], token_ids=[7, 7, 2])  # type: ignore[arg-type]
    spec = logprob_spec([None, as_lists])
    assert spec.modes.tolist() == [[-1, -1], [1, 0]]
    assert spec.asked_ids.tolist() == [7, 7, 2]
    assert spec.cu_asked.tolist() == [0, 0, 3]


def test_modes_come_in_the_order_a_request_asks(kernels: str) -> None:
    logits = [[2.0, 1.0, 0.0]]
    one = _ask(logits, [1], _wish("raw", "temperature"), temperature=0.5).to_host()
    two = _ask(logits, [1], _wish("temperature", "raw"), temperature=0.5).to_host()
    assert one.chosen[0] == two.chosen[1]
    assert one.chosen[1] == two.chosen[0]
    assert one.chosen[0] != one.chosen[1]
