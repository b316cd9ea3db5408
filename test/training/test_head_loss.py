import pytest
import torch
from torch import Tensor

from truespec.training import head_loss
from truespec.training.head_loss import HeadLoss, make_teacher


def naive_loss(
    logits: Tensor, p: Tensor, weights: Tensor, ce: float, overlap: float
) -> tuple[Tensor, Tensor]:
    """Full distributions in float64: the definition."""
    log_q = logits.log_softmax(-1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    losses = ce * -(p * log_q).sum(-1) + overlap * l1
    return (weights * losses).sum(), 1.0 - 0.5 * l1


@pytest.mark.parametrize(("ce", "overlap"), [(1.0, 0.0), (0.0, 1.0), (0.1, 0.9)])
def test_loss_and_gradients_equal_the_definition(
    ce: float, overlap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "CHUNK", 4)  # several chunks, the last one short
    torch.manual_seed(0)
    rows, hidden_size, rank, vocab = 11, 8, 3, 19
    hidden, markov = torch.randn(rows, hidden_size), torch.randn(rows, rank)
    w2, head = torch.randn(vocab, rank), torch.randn(vocab, hidden_size)
    p = torch.randn(rows, vocab).mul(2).softmax(-1)
    probs, draft_ids = p.sort(dim=-1, descending=True)
    weights = torch.rand(rows)
    weights[3] = 0.0
    inputs = [t.requires_grad_() for t in (hidden, markov, w2)]
    loss, overlaps, best = HeadLoss.apply(*inputs, head, draft_ids, probs, weights, ce, overlap)
    loss.backward()

    exact = [t.detach().double().requires_grad_() for t in inputs]
    logits = exact[0] @ head.double().T + exact[1] @ exact[2].T
    wanted, wanted_overlaps = naive_loss(logits, p.double(), weights.double(), ce, overlap)
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert torch.allclose(overlaps.double(), wanted_overlaps, atol=1e-6)
    assert torch.equal(best, logits.argmax(-1))
    for got, reference in zip(inputs, exact, strict=True):
        assert torch.allclose(got.grad.double(), reference.grad, atol=1e-5)


def test_a_cut_teacher_counts_the_rest_as_missed_mass() -> None:
    hidden, head = torch.randn(5, 8), torch.randn(19, 8)
    full, cut = make_teacher(hidden, head, 19), make_teacher(hidden, head, 6)
    assert torch.allclose(full.probs.sum(-1), torch.ones(5), atol=1e-5)
    assert torch.equal(cut.draft_ids, full.draft_ids[:, :6])
    assert torch.allclose(cut.probs, full.probs[:, :6])
