"""A chain chosen in one call is the chain that one choice after the other gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from truespec.kernels.draft_chain import Transition
from truespec.kernels.rows import has_numba
from truespec.layers.sampler import sample_draft, sample_draft_chains

VOCAB = 1823
NUM_ROWS, NUM_STEPS = 3, 4


@pytest.fixture(
    params=[
        "torch",
        pytest.param("numba", marks=pytest.mark.skipif(not has_numba(), reason="no numba")),
    ],
    autouse=True,
)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESPEC_CPU_KERNELS", request.param)


def _inputs(num_drafts: int, rank: int) -> tuple[Tensor, Transition, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(NUM_ROWS, NUM_STEPS, num_drafts, generator=generator)
    w1 = torch.randn(VOCAB, rank, generator=generator)
    w2 = torch.randn(rank, num_drafts, generator=generator).to(torch.bfloat16)
    keys = {
        "temperature": torch.tensor([0.0, 1.0, 0.7]),
        "seed": torch.tensor([1, -2, 3]),
        "position": torch.tensor([5, 0, 9]),
    }
    return logits, Transition(w1, w2), keys


@pytest.mark.parametrize(("num_drafts", "rank"), [(VOCAB, 8), (700, 7), (5, 1)])
@pytest.mark.parametrize("domain", [0, 1])
def test_a_chain_equals_choices_on_biased_logits(num_drafts: int, rank: int, domain: int) -> None:
    logits, transition, keys = _inputs(num_drafts, rank)
    target_ids = None if num_drafts == VOCAB else torch.arange(num_drafts) * 2 + 1
    previous = torch.tensor([7, 8, 9])
    biased = logits.clone()
    token_ids, logprobs = sample_draft_chains(
        biased, previous, transition, **keys, target_ids=target_ids, domain=domain
    )
    for step in range(NUM_STEPS):
        exact = logits[:, step].double() + transition.w1[previous].double() @ transition.w2.double()
        torch.testing.assert_close(biased[:, step].double(), exact, rtol=1e-5, atol=1e-4)
        at = keys | {"position": keys["position"] + step}
        expected = sample_draft(exact.float(), **at, target_ids=target_ids, domain=domain)
        previous = token_ids[:, step]
        assert torch.equal(previous, expected[0])
        torch.testing.assert_close(logprobs[:, step], expected[1], rtol=1e-5, atol=1e-4)


def test_a_chain_goes_on_behind_a_row_with_nan() -> None:
    logits, transition, keys = _inputs(VOCAB, 4)
    logits[1, 2, 100] = torch.nan
    token_ids, logprobs = sample_draft_chains(
        logits, torch.zeros(NUM_ROWS, dtype=torch.int64), transition, **keys
    )
    assert token_ids[1, 2] == 0
    assert logprobs[1, 2] == -torch.inf
    assert logprobs.isfinite().sum() == NUM_ROWS * NUM_STEPS - 1


def test_no_chains_give_empty_results() -> None:
    logits, transition, keys = _inputs(VOCAB, 4)
    none = {name: key[:0] for name, key in keys.items()}
    token_ids, logprobs = sample_draft_chains(
        logits[:0], torch.zeros(0, dtype=torch.int64), transition, **none
    )
    assert token_ids.shape == logprobs.shape == (0, NUM_STEPS)
