"""Loss over the draft vocabulary without ever storing the logits of all rows.

Knows logits, target distributions and weights; knows nothing of blocks or of the model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

CHUNK = 128  # rows whose logits exist at one time; small, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class Teacher:
    """The k largest entries of target distributions p at P positions, over the draft vocabulary."""

    draft_ids: Tensor  # [P, k] int64
    probs: Tensor  # [P, k] fp32


def make_teacher(hidden: Tensor, head: Tensor, top_k: int) -> Teacher:
    """Target distributions at T = 1, renormalised over the draft vocabulary.

    hidden [P, H] post-norm target hidden, head [DV, H] the target's rows of the draft vocabulary.
    """
    ids, probs = [], []
    buffer = torch.empty(CHUNK, head.shape[0], device=head.device)
    for rows in torch.split(hidden, CHUNK):
        logits = buffer[: rows.shape[0]].copy_(rows.to(head.dtype) @ head.T)
        top = logits.topk(min(top_k, head.shape[0]), dim=-1)
        largest = top.values[:, :1]
        norm = logits.sub_(largest).exp_().sum(-1, keepdim=True)
        probs.append((top.values - largest).exp() / norm)
        ids.append(top.indices)
    return Teacher(torch.cat(ids), torch.cat(probs))


class HeadLoss(torch.autograd.Function):
    """Σ_rows w · (ce · CE + overlap · L1) with q = softmax([hidden | markov] · weightᵀ).

    CE = -Σ_k p_k log q_k and L1 = 2 (1 - Σ_k min(p_k, q_k)), k over the teacher's entries; L1 is
    Σ_v |q - p| when the teacher keeps every entry.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,  # [N, H]
        markov: Tensor,  # [N, r]
        markov_w2: Tensor,  # [DV, r]
        head: Tensor,  # [DV, H], frozen; the GEMMs run in its dtype
        draft_ids: Tensor,  # [N, k] int64
        probs: Tensor,  # [N, k] fp32
        weights: Tensor,  # [N] fp32
        ce: float,
        overlap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> loss [] fp32, overlaps Σ_k min(p_k, q_k) [N] fp32, argmax of q [N] int64."""
        full = torch.cat([head, markov_w2.to(head.dtype)], dim=1)
        inputs = torch.cat([hidden.to(head.dtype), markov.to(head.dtype)], dim=1)
        grad_inputs = torch.empty_like(inputs)
        grad_w2 = torch.zeros_like(markov_w2, dtype=torch.float32)
        loss = torch.zeros((), device=head.device)
        overlaps, best = torch.empty_like(weights), torch.empty_like(draft_ids[:, 0])
        width = head.shape[1]
        # NOTE: one buffer for all chunks. Fresh memory costs more than the arithmetic on it.
        buffer = torch.empty(CHUNK, head.shape[0], device=head.device)
        for start in range(0, inputs.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            product = inputs[rows] @ full.T
            part, overlaps[rows], best[rows], grad_logits = _loss_and_grad(
                buffer[: product.shape[0]].copy_(product),
                draft_ids[rows],
                probs[rows],
                weights[rows],
                ce,
                overlap,
            )
            grad = product.copy_(grad_logits)
            loss += part
            grad_inputs[rows] = grad @ full
            grad_w2 += (grad.T @ inputs[rows, width:]).float()
        ctx.save_for_backward(grad_inputs[:, :width], grad_inputs[:, width:], grad_w2)
        ctx.mark_non_differentiable(overlaps, best)
        return loss, overlaps, best

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, markov, w2 = ctx.saved_tensors  # type: ignore[attr-defined]  # missing in the stubs
        return (hidden * grad_loss, markov * grad_loss, w2 * grad_loss, *[None] * 6)


def _loss_and_grad(
    logits: Tensor,
    draft_ids: Tensor,
    probs: Tensor,
    weights: Tensor,
    ce: float,
    overlap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One chunk, overwriting `logits`: loss [], overlaps [n], argmax [n], gradient [n, DV].

    dL1/dz_v = 2 q_v (Q_S - [v in S]) with S = {k: q_k < p_k}, Q_S = Σ_S q; dCE/dz = q Σp - p.
    """
    largest, best = logits.max(-1, keepdim=True)
    logits.sub_(largest)
    shifted = logits.gather(1, draft_ids)
    norm = logits.exp_().sum(-1, keepdim=True)
    log_q = shifted - norm.log()
    q_top = log_q.exp()
    overlaps = torch.minimum(probs, q_top).sum(-1)
    losses = ce * -(probs * log_q).sum(-1) + overlap * 2.0 * (1.0 - overlaps)
    below = torch.where(q_top < probs, q_top, 0.0)
    scale = weights * (ce * probs.sum(-1) + 2.0 * overlap * below.sum(-1))
    grad = logits.mul_(scale.unsqueeze(-1) / norm)
    grad.scatter_add_(1, draft_ids, -weights.unsqueeze(-1) * (ce * probs + 2.0 * overlap * below))
    return (weights * losses).sum(), overlaps, best.squeeze(-1), grad
