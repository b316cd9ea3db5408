"""Accepted length on held-out answers: replays what verification would do, without an engine."""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from .blocks import BlockBatch, all_anchors, make_batch
from .cache import FeatureCache
from .dspark_model import BlockModel, forward_blocks
from .head_loss import make_teacher


@torch.no_grad()
def measure_blocks(
    model: BlockModel,
    embedding: Tensor,
    draft_head: Tensor,
    draft_vocab: Tensor,
    cache: FeatureCache,
) -> dict[str, float]:
    """Mean accepted lengths, bonus included.

    `greedy` and `greedy/<category>`: tokens per round of answers at T = 0, drafting from each
    round's anchor with the Markov head fed by its own drafts. `prob`: expected length at T = 1,
    mean over all anchors of answers at T = 1, 1 + Σ_k Π_{i<=k} Σ_v min(p_i, q_i). `row<i>`:
    agreement of draft i with the greedy token, given that the drafts before it were right.
    """
    rounds: dict[str, list[int]] = defaultdict(list)
    hits, probs = [], []
    for i in range(len(cache)):
        sequence = cache[i]
        anchors = all_anchors(sequence)
        if len(anchors) == 0:
            continue
        batch = make_batch([sequence], [anchors], model.shape.block_size).to(embedding.device)
        hidden = forward_blocks(model, batch, embedding)[0]
        if sequence.temperature == 0.0:
            hit, _ = draft_greedily(model, batch, hidden, draft_head, draft_vocab)
            hits.append(hit.cpu())
            rounds[sequence.category] += round_lengths(hit.sum(-1).cpu().numpy())
        elif sequence.temperature == 1.0:
            probs.append(_expected_lengths(model, batch, hidden, draft_head).cpu())
    return summarize(rounds, hits, probs)


def draft_greedily(
    model: BlockModel, batch: BlockBatch, hidden: Tensor, draft_head: Tensor, draft_vocab: Tensor
) -> tuple[Tensor, Tensor]:
    """Draft from every anchor of one sequence, the Markov head fed by its own drafts.

    hidden [A, G, H] -> hits [A, G] bool: draft i and all before it equal the recorded tokens;
    inputs of the confidence head [A, G, H + r] fp32.
    """
    full = torch.cat([draft_head, model.markov_weight().to(draft_head.dtype)], dim=1)
    previous = batch.previous_ids[0, :, 0]
    alive, hits, inputs = torch.ones_like(previous, dtype=torch.bool), [], []
    for i in range(hidden.shape[1]):
        markov = model.markov_rows(previous)
        inputs.append(torch.cat([hidden[:, i], markov], dim=1).float())
        logits = inputs[-1].to(full.dtype) @ full.T
        previous = draft_vocab[logits.argmax(-1)]
        alive = alive & batch.is_label[0, :, i] & (previous == batch.label_ids[0, :, i])
        hits.append(alive)
    return torch.stack(hits, dim=1), torch.stack(inputs, dim=1)


def round_lengths(accepted: np.ndarray) -> list[int]:
    """Tokens of each round of one answer; accepted [A] drafts accepted from each anchor."""
    lengths, anchor = [], 0
    while anchor < len(accepted):
        # NOTE: the last round is cut at the answer's end, where no bonus token is recorded.
        lengths.append(min(int(accepted[anchor]) + 1, len(accepted) - anchor))
        anchor += lengths[-1]
    return lengths


def _expected_lengths(
    model: BlockModel, batch: BlockBatch, hidden: Tensor, draft_head: Tensor
) -> Tensor:
    """[A] fp32 expected accepted length of each anchor of one sequence, true previous tokens."""
    full = torch.cat([draft_head, model.markov_weight().to(draft_head.dtype)], dim=1)
    teacher = make_teacher(batch.last[0], draft_head, top_k=256)
    length = torch.ones(hidden.shape[0], device=hidden.device)
    alive = torch.ones_like(length)
    for i in range(hidden.shape[1]):
        markov = model.markov_rows(batch.previous_ids[0, :, i])
        logits = (torch.cat([hidden[:, i], markov], dim=1).to(full.dtype) @ full.T).float()
        source = batch.label_positions[0, :, i] - 1
        ids = teacher.draft_ids[source]
        q = (logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)).exp()
        overlap = torch.minimum(q, teacher.probs[source]).sum(-1)
        alive = alive * overlap * batch.is_label[0, :, i]
        length += alive
    return length


def summarize(
    rounds: dict[str, list[int]], hits: list[Tensor], probs: list[Tensor]
) -> dict[str, float]:
    """Figures by name: `rounds` tokens per round by category, `hits` [., G] bool, `probs` [.]."""
    out: dict[str, float] = {}
    if rounds:
        out["greedy"] = float(np.mean(np.concatenate(list(rounds.values()))))
        out |= {f"greedy/{name}": float(np.mean(r)) for name, r in sorted(rounds.items())}
        all_hits = torch.cat(hits).float()
        reached = torch.cat([torch.ones(len(all_hits), 1), all_hits[:, :-1]], dim=1).sum(0)
        out |= {f"row{i}": float(x) for i, x in enumerate(all_hits.sum(0) / reached.clamp(min=1))}
    if probs:
        out["prob"] = float(torch.cat(probs).mean())
    return out
