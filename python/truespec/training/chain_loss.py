"""Loss and held-out figures of drafters whose drafts are chains: EAGLE-3 and MTP heads.

Knows hidden states of draft steps, labels and the target's head; knows no drafter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from .blocks import sample_anchors
from .cache import FeatureCache, FeatureSequence
from .chains import ChainBatch, chain_rows, pack_chains
from .config import Batching
from .eagle_config import ChainLoss
from .head_loss import HeadLoss, Teacher, make_teacher
from .measure import round_lengths, summarize

MEASURED_TOGETHER = 8  # sequences


def draw_chains(cache: FeatureCache, weights: np.ndarray, o: Batching, index: int) -> ChainBatch:
    """Different sequences, drawn by weight, and random chains in each; by (seed, index) alone."""
    rng = np.random.default_rng([o.seed, index])
    chosen = rng.choice(len(cache), min(o.num_sequences, len(cache)), replace=False, p=weights)
    sequences = [cache[int(i)] for i in chosen]
    rows = [np.sort(sample_anchors(s, o.anchors_per_sequence, rng)) - 1 for s in sequences]
    return pack_chains(sequences, rows)


def chain_loss(
    hidden: Tensor,
    batch: ChainBatch,
    *,
    draft_head: Tensor,
    draft_vocab: Tensor,
    config: ChainLoss,
    progress: float,
) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean over supervised rows of ce · CE + overlap · L1.

    hidden [K, R, H] post-norm, draft_head [DV, H] bf16, draft_vocab [DV] int64. Rows whose true
    token is outside the draft vocabulary are not supervised. Metrics as of `dspark_loss`.
    """
    only_ce = progress < config.ce_only_fraction
    label_rows, is_label = batch.labels(len(hidden))
    label_ids = batch.token_ids[label_rows]
    reachable = is_label & torch.isin(label_ids, draft_vocab)
    weights = reachable * config.decay ** torch.arange(len(hidden)).unsqueeze(1)
    teacher, teacher_rows = label_teacher(batch, label_rows, draft_head, config.teacher_top_k)
    loss, overlaps, best = HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch stub
        hidden.flatten(0, 1),
        hidden.new_empty(hidden[..., 0].numel(), 0),
        draft_head.new_empty(len(draft_head), 0),
        draft_head,
        teacher.draft_ids[teacher_rows].flatten(0, 1),
        teacher.probs[teacher_rows].flatten(0, 1),
        (weights / weights.sum().clamp(min=1e-6)).flatten(),
        1.0 if only_ce else config.ce,
        0.0 if only_ce else config.overlap,
    )
    expected = (overlaps.view_as(reachable) * reachable).clamp(0, 1)
    top1 = draft_vocab[best.view_as(reachable)[0]] == label_ids[0]
    first = is_label[0]
    return loss, {
        "loss": float(loss.detach()),
        "tau": 1.0 + float(expected.cumprod(0).sum(0)[first].mean()),
        "top1": float(top1[first].float().mean()),
    }


def label_teacher(
    batch: ChainBatch, label_rows: Tensor, draft_head: Tensor, top_k: int
) -> tuple[Teacher, Tensor]:
    """Target distributions of the labels, once per token, and each label's index into them."""
    # NOTE: the token at row j was produced by the target's hidden of row j - 1.
    used, index = torch.unique(label_rows - 1, return_inverse=True)
    return make_teacher(batch.last[used], draft_head, top_k), index


@torch.no_grad()
def measure_chains(
    forward: Callable[[ChainBatch], Tensor],
    draft_head: Tensor,
    draft_vocab: Tensor,
    cache: FeatureCache,
) -> dict[str, float]:
    """Mean accepted lengths of drafts by `forward` ([K, R, H]); keys as of `measure_dspark`.

    NOTE: true tokens are fed, not drafts: they are the same up to a chain's first wrong draft.
    """
    rounds: dict[str, list[int]] = defaultdict(list)
    hits, probs = [], []
    for batch, sequences in _all_chains(cache, temperature=0.0):
        hit = _greedy_hits(forward(batch), batch, draft_head, draft_vocab)
        hits.append(hit)
        own_hits = torch.split(hit.sum(-1), batch.counts)
        for sequence, own in zip(sequences, own_hits, strict=True):
            rounds[sequence.category] += round_lengths(own.numpy())
    for batch, _ in _all_chains(cache, temperature=1.0):
        probs.append(_expected_lengths(forward(batch), batch, draft_head))
    return summarize(rounds, hits, probs)


def _all_chains(
    cache: FeatureCache, temperature: float
) -> Iterator[tuple[ChainBatch, list[FeatureSequence]]]:
    """Every chain of the answers at a temperature, a few sequences at a time."""
    usable = [s for s in cache if s.temperature == temperature and len(chain_rows(s)) > 0]
    for start in range(0, len(usable), MEASURED_TOGETHER):
        group = usable[start : start + MEASURED_TOGETHER]
        yield pack_chains(group, [chain_rows(s) for s in group]), group


def _greedy_hits(
    hidden: Tensor, batch: ChainBatch, draft_head: Tensor, draft_vocab: Tensor
) -> Tensor:
    """[R, K] bool: draft j and all before it equal the recorded tokens."""
    label_rows, is_label = batch.labels(len(hidden))
    alive = torch.ones_like(is_label[0])
    hits = []
    for states, rows, exists in zip(hidden, label_rows, is_label, strict=True):
        reached = (alive & exists).nonzero().squeeze(1)
        best = draft_vocab[(states[reached].to(draft_head.dtype) @ draft_head.T).argmax(-1)]
        alive = torch.zeros_like(alive).index_put(
            (reached,), best == batch.token_ids[rows[reached]]
        )
        hits.append(alive)
    return torch.stack(hits, dim=1)


def _expected_lengths(hidden: Tensor, batch: ChainBatch, draft_head: Tensor) -> Tensor:
    """[R] fp32 expected accepted length of each chain at T = 1, bonus included."""
    label_rows, is_label = batch.labels(len(hidden))
    teacher, index = label_teacher(batch, label_rows, draft_head, top_k=256)
    length, alive = torch.ones(len(batch.rows)), torch.ones(len(batch.rows))
    for states, rows, exists in zip(hidden, index, is_label, strict=True):
        logits = (states.to(draft_head.dtype) @ draft_head.T).float()
        q = (logits.gather(1, teacher.draft_ids[rows]) - logits.logsumexp(-1, keepdim=True)).exp()
        alive = alive * torch.minimum(q, teacher.probs[rows]).sum(-1) * exists
        length += alive
    return length
