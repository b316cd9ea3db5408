"""First values of a block drafter: draft vocabulary, bigram Markov head, embeddings, scales.

Everything here is closed form or taken from a checkpoint; nothing is trained.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .cache import FeatureCache
from .dspark_model import BlockModel, DSparkModel
from .export import read_shape, read_tensors
from .target import Target

# What a drafter has in common with the one whose weights it takes over.
TAKEN_OVER = ("target_layer_ids", "num_layers", "num_kv_heads", "draft_vocab_size", "markov_rank")
W2 = "markov_head.markov_w2.weight"


def choose_draft_vocab(counts: np.ndarray, size: int) -> Tensor:
    """The `size` most frequent ids, ascending; [DV] int64. Ties go to the lower id."""
    order = np.argsort(-counts, kind="stable")
    return torch.from_numpy(np.sort(order[:size])).to(torch.int64)


def measure_tap_scale(cache: FeatureCache, num_sequences: int = 64) -> Tensor:
    """Root mean square of each tap dimension over generated tokens; [m * H] fp32, at least 1e-3."""
    rows = [cache[i] for i in range(min(num_sequences, len(cache)))]
    taps = torch.cat([s.taps[s.loss_mask.bool()] for s in rows]).float()
    return taps.square().mean(0).sqrt().clamp(min=1e-3).flatten()


@torch.no_grad()
def start_markov_head(
    model: DSparkModel, draft_vocab: Tensor, pairs: np.ndarray, counts: np.ndarray
) -> None:
    """W1, W2 := truncated SVD of log p(next | previous) - log p(next), smoothed, unseen pairs 0."""
    vocab, rank = model.dims.vocab, model.markov_weight().shape[1]
    to_draft = torch.full((vocab,), -1)
    to_draft[draft_vocab] = torch.arange(len(draft_vocab))
    previous, following = torch.from_numpy(pairs).T
    count = torch.from_numpy(counts).double()
    unigram = torch.zeros(vocab, dtype=torch.float64).index_add_(0, following, count) / count.sum()
    total = torch.zeros(vocab, dtype=torch.float64).index_add_(0, previous, count)
    smoothing = 20.0
    p = (count + smoothing * unigram[following]) / (total[previous] + smoothing)
    gain = (p / unigram[following]).log().float()
    keep = to_draft[following] >= 0
    places = torch.stack([previous[keep], to_draft[following[keep]]])
    matrix = torch.sparse_coo_tensor(places, gain[keep], (vocab, len(draft_vocab)))
    torch.manual_seed(0)  # svd_lowrank starts from a random projection
    u, s, v = torch.svd_lowrank(matrix.coalesce(), q=rank, niter=4)
    model.markov_head.markov_w1.weight.copy_(u * s.sqrt())
    model.markov_head.markov_w2.weight.copy_(v * s.sqrt())


@torch.no_grad()
def start_embeddings(model: BlockModel, target: Target, draft_vocab: Tensor) -> None:
    """Mask embedding := mean of the draft vocabulary's; final norm := a part of the target's."""
    model.mask_embedding.copy_(target.embedding[draft_vocab].float().mean(0))
    # NOTE: the backbone starts quiet, so that the first logits are those of the bigrams.
    model.norm.weight.copy_(0.15 * target.norm.float())


@torch.no_grad()
def start_from_checkpoint(model: BlockModel, path: Path, counts: np.ndarray) -> Tensor:
    """Every parameter := the checkpoint's; returns the draft vocabulary, [DV] int64.

    Heads that the model lacks are left out. A model with more draft ids than the checkpoint has
    its ids and the most frequent of the others, by `counts` [V]; the Markov head starts at 0 for
    these. Raises ValueError if the checkpoint has another shape; its block may have any length.
    """
    theirs = read_shape(path)
    for name in TAKEN_OVER:
        wanted, given = getattr(model.shape, name, theirs.markov_rank), getattr(theirs, name)
        if wanted != given and not (name == "draft_vocab_size" and wanted > given):
            raise ValueError(f"{path} has {name} {given}, not {wanted}")
    tensors, own_ids = read_tensors(path)
    preferred = counts.astype(np.float64)
    preferred[own_ids.numpy()] += np.inf
    draft_vocab = choose_draft_vocab(preferred, model.shape.draft_vocab_size)
    if W2 in tensors:
        grown = tensors[W2].new_zeros(len(draft_vocab), tensors[W2].shape[1])
        tensors[W2] = grown.index_copy(0, torch.searchsorted(draft_vocab, own_ids), tensors[W2])
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])
    model.fc.weight.mul_(model.tap_scale)
    return draft_vocab
