"""A chain chosen in one call is the chain that one choice after the other gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from row_kernels import row_kernels
from truespec.kernels.draft_chain import Confidence, Transition, tiled
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
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with row_kernels(request.param):
        yield


def _inputs(num_drafts: int, rank: int) -> tuple[Tensor, Tensor, Transition, dict[str, Tensor]]:
    """Logits, W2 [DV, r], the transition that holds it, and what the draws depend on."""
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(NUM_ROWS, NUM_STEPS, num_drafts, generator=generator)
    w1 = torch.randn(VOCAB, rank, generator=generator)
    w2 = torch.randn(num_drafts, rank, generator=generator).to(torch.bfloat16)
    keys = {
        "temperature": torch.tensor([0.0, 1.0, 0.7]),
        "seed": torch.tensor([1, -2, 3]),
        "position": torch.tensor([5, 0, 9]),
    }
    return logits, w2, Transition(w1, tiled(w2)), keys


@pytest.mark.parametrize(("num_drafts", "rank"), [(VOCAB, 8), (700, 7), (5, 1)])
@pytest.mark.parametrize("domain", [0, 1])
def test_a_chain_equals_choices_on_biased_logits(num_drafts: int, rank: int, domain: int) -> None:
    logits, w2, transition, keys = _inputs(num_drafts, rank)
    target_ids = None if num_drafts == VOCAB else torch.arange(num_drafts) * 2 + 1
    previous = torch.tensor([7, 8, 9])
    biased = logits.clone()
    token_ids, logprobs, _ = sample_draft_chains(
        biased, previous, transition, **keys, target_ids=target_ids, domain=domain
    )
    for step in range(NUM_STEPS):
        exact = logits[:, step].double() + transition.w1[previous].double() @ w2.T.double()
        torch.testing.assert_close(biased[:, step].double(), exact, rtol=1e-5, atol=1e-4)
        at = keys | {"position": keys["position"] + step}
        expected = sample_draft(exact.float(), **at, target_ids=target_ids, domain=domain)
        previous = token_ids[:, step]
        assert torch.equal(previous, expected[0])
        torch.testing.assert_close(logprobs[:, step], expected[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sees_previous", [True, False])
def test_confidences_are_those_of_the_states_and_the_tokens_before(sees_previous: bool) -> None:
    rank, width = 7, 18
    logits, _, transition, keys = _inputs(VOCAB, rank)
    generator = torch.Generator().manual_seed(1)
    confidence = Confidence(
        weight=torch.randn(width + rank if sees_previous else width, generator=generator),
        bias=torch.tensor([0.3]),
        temperatures=torch.tensor([1.0, 0.5, 2.0, 1.5, 9.0]),
        hidden=torch.randn(NUM_ROWS, NUM_STEPS, width, generator=generator),
    )
    anchors = torch.tensor([7, 8, 9])
    found = sample_draft_chains(logits, anchors, transition, **keys, confidence=confidence)
    before = torch.cat([anchors.unsqueeze(1), found.token_ids[:, :-1]], dim=1)
    z = torch.cat([confidence.hidden, transition.w1[before]], dim=2)[..., : len(confidence.weight)]
    score = z.double() @ confidence.weight.double() + confidence.bias
    expected = torch.sigmoid(score / confidence.temperatures[:NUM_STEPS])
    assert found.confidences is not None
    torch.testing.assert_close(found.confidences.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_chain_goes_on_behind_a_row_with_nan() -> None:
    logits, _, transition, keys = _inputs(VOCAB, 4)
    logits[1, 2, 100] = torch.nan
    token_ids, logprobs, _ = sample_draft_chains(
        logits, torch.zeros(NUM_ROWS, dtype=torch.int64), transition, **keys
    )
    assert token_ids[1, 2] == 0
    assert logprobs[1, 2] == -torch.inf
    assert logprobs.isfinite().sum() == NUM_ROWS * NUM_STEPS - 1


def test_no_chains_give_empty_results() -> None:
    logits, _, transition, keys = _inputs(VOCAB, 4)
    none = {name: key[:0] for name, key in keys.items()}
    token_ids, logprobs, _ = sample_draft_chains(
        logits[:0], torch.zeros(0, dtype=torch.int64), transition, **none
    )
    assert token_ids.shape == logprobs.shape == (0, NUM_STEPS)
