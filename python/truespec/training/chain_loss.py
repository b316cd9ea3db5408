"""Loss and held-out figures of drafters whose drafts are chains: EAGLE-3 and MTP heads.

Knows hidden states of draft steps, labels and the target's head; knows no drafter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from .blocks import sample_anchors
from .cache import FeatureCache, FeatureSequence
from .chains import ChainBatch, Steps, chain_rows, pack_chains
from .config import Batching
from .eagle_config import ChainLoss
from .head_loss import HeadLoss, Teacher, make_teacher
from .measure import round_lengths, summarize

MEASURED_TOGETHER = 8  # sequences


def draw_chains(
    cache: FeatureCache, weights: np.ndarray, o: Batching, index: int, *, decay: float
) -> ChainBatch:
    """Different sequences, drawn by weight, and random chains in each; by (seed, index) alone.

    A chain goes on from each step to the next with probability `decay`.
    """
    rng = np.random.default_rng([o.seed, index])
    chosen = rng.choice(len(cache), min(o.num_sequences, len(cache)), replace=False, p=weights)
    sequences = [cache[int(i)] for i in chosen]
    rows = [sample_anchors(s, o.anchors_per_sequence, rng) - 1 for s in sequences]
    return pack_chains(sequences, rows, rng.geometric(1.0 - decay, sum(map(len, rows))))


def chain_loss(
    hidden: Seq[Tensor],
    batch: ChainBatch,
    *,
    draft_head: Tensor,
    draft_vocab: Tensor,
    config: ChainLoss,
    progress: float,
) -> tuple[Tensor, dict[str, float]]:
    """Mean over supervised drafts of ce · CE + overlap · L1.

    hidden: post-norm, per step [alive chains, H]; draft_head [DV, H] bf16, draft_vocab [DV] int64.
    Drafts whose true token is outside the draft vocabulary are not supervised. Metrics as of
    `dspark_loss`, `tau` over the chains of full depth.
    """
    only_ce = progress < config.ce_only_fraction
    steps = batch.steps(len(hidden))
    label_ids = batch.token_ids[steps.label_rows]
    reachable = steps.is_label & torch.isin(label_ids, draft_vocab)
    teacher, index = label_teacher(batch, steps.label_rows, draft_head, config.teacher_top_k)
    states = torch.cat(list(hidden))
    loss, overlaps, best = HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch stub
        states,
        states.new_empty(len(states), 0),
        draft_head.new_empty(len(draft_head), 0),
        draft_head,
        teacher.draft_ids[index],
        teacher.probs[index],
        reachable / reachable.sum().clamp(min=1),
        1.0 if only_ce else config.ce,
        0.0 if only_ce else config.overlap,
    )
    first = steps.is_label[: steps.counts[0]]
    top1 = (draft_vocab[best] == label_ids)[: steps.counts[0]]
    return loss, {
        "loss": float(loss.detach()),
        "tau": _expected_length((overlaps * reachable).clamp(0, 1), steps),
        "top1": float(top1[first].float().mean()),
    }


def label_teacher(
    batch: ChainBatch, label_rows: Tensor, draft_head: Tensor, top_k: int
) -> tuple[Teacher, Tensor]:
    """Target distributions of the labels, once per token, and each label's index into them."""
    # NOTE: the token at row j was produced by the target's hidden of row j - 1.
    used, index = torch.unique(label_rows - 1, return_inverse=True)
    return make_teacher(batch.last[used], draft_head, top_k), index


def _expected_length(overlaps: Tensor, steps: Steps) -> float:
    """Mean of 1 + Σ_k Π_{i<=k} overlap_i over the chains that take every step; overlaps [M]."""
    alive = torch.zeros(steps.counts[0], device=overlaps.device)
    full = steps.chains[len(steps.chains) - steps.counts[-1] :]
    alive[full], length = 1.0, 1.0
    for chains, own in zip(
        torch.split(steps.chains, steps.counts), torch.split(overlaps, steps.counts), strict=True
    ):
        alive[chains] *= own
        length += float(alive[full].mean())
    return length


@torch.no_grad()
def measure_chains(
    forward: Callable[[ChainBatch], Seq[Tensor]],
    draft_head: Tensor,
    draft_vocab: Tensor,
    cache: FeatureCache,
) -> dict[str, float]:
    """Mean accepted lengths of drafts by `forward` (per step [R, H]); keys as of `measure_dspark`.

    NOTE: true tokens are fed, not drafts: they are the same up to a chain's first wrong draft.
    """
    rounds: dict[str, list[int]] = defaultdict(list)
    hits, probs = [], []
    for batch, sequences in _all_chains(cache, 0.0, draft_head.device):
        hit = _greedy_hits(forward(batch), batch, draft_head, draft_vocab).cpu()
        hits.append(hit)
        own_hits = torch.split(hit.sum(-1), torch.bincount(batch.sequences).tolist())
        for sequence, own in zip(sequences, own_hits, strict=True):
            rounds[sequence.category] += round_lengths(own.numpy())
    for batch, _ in _all_chains(cache, 1.0, draft_head.device):
        probs.append(_expected_lengths(forward(batch), batch, draft_head).cpu())
    return summarize(rounds, hits, probs)


def _all_chains(
    cache: FeatureCache, temperature: float, device: torch.device
) -> Iterator[tuple[ChainBatch, list[FeatureSequence]]]:
    """Every chain of the answers at a temperature, a few sequences at a time."""
    usable = [s for s in cache if s.temperature == temperature and len(chain_rows(s)) > 0]
    for start in range(0, len(usable), MEASURED_TOGETHER):
        group = usable[start : start + MEASURED_TOGETHER]
        yield pack_chains(group, [chain_rows(s) for s in group]).to(device), group


def _greedy_hits(
    hidden: Seq[Tensor], batch: ChainBatch, draft_head: Tensor, draft_vocab: Tensor
) -> Tensor:
    """[R, K] bool: draft j and all before it equal the recorded tokens."""
    steps = batch.steps(len(hidden))
    alive = torch.ones_like(batch.rows, dtype=torch.bool)
    hits = []
    for states, labels, exists in zip(hidden, *_by_step(steps), strict=True):
        reached = (alive & exists).nonzero().squeeze(1)
        best = draft_vocab[(states[reached].to(draft_head.dtype) @ draft_head.T).argmax(-1)]
        right = best == batch.token_ids[labels[reached]]
        alive = torch.zeros_like(alive).index_put((reached,), right)
        hits.append(alive)
    return torch.stack(hits, dim=1)


def _expected_lengths(hidden: Seq[Tensor], batch: ChainBatch, draft_head: Tensor) -> Tensor:
    """[R] fp32 expected accepted length of each chain at T = 1, bonus included."""
    steps = batch.steps(len(hidden))
    teacher, index = label_teacher(batch, steps.label_rows, draft_head, top_k=256)
    length = torch.ones_like(batch.rows, dtype=torch.float32)
    alive = torch.ones_like(length)
    for states, rows, exists in zip(
        hidden, torch.split(index, steps.counts), _by_step(steps)[1], strict=True
    ):
        logits = (states.to(draft_head.dtype) @ draft_head.T).float()
        q = (logits.gather(1, teacher.draft_ids[rows]) - logits.logsumexp(-1, keepdim=True)).exp()
        alive = alive * torch.minimum(q, teacher.probs[rows]).sum(-1) * exists
        length += alive
    return length


def _by_step(steps: Steps) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Label rows and whether they exist, of each step."""
    return torch.split(steps.label_rows, steps.counts), torch.split(steps.is_label, steps.counts)
