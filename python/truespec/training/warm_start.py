"""First values of a DSpark drafter: the target's own layers, bigrams, a draft vocabulary.

Everything here is closed form; nothing is trained.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from .cache import FeatureCache
from .dspark_model import DSparkModel
from .target import Target


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
def copy_target_layers(model: DSparkModel, target: Target, layers: Seq[int]) -> None:
    """Draft layer i := target layer `layers[i]`; the context becomes what the first of them reads.

    `fc` selects the output of layer `layers[0] - 1`, which must be a tap, and `hidden_norm` is the
    input norm of `layers[0]`, so the first draft layer's context K and V start equal to the
    target's own. Later layers read it through their own norm, folded into their projections.
    """
    first_norm = target.layer(layers[0])["input_layernorm.weight"].float()
    tap = model.shape.target_layer_ids.index(layers[0] - 1)
    columns = slice(tap * model.dims.hidden, (tap + 1) * model.dims.hidden)
    model.fc.weight[:, columns] = torch.diag(model.tap_scale[columns])
    model.hidden_norm.weight.copy_(first_norm)
    for layer, index in zip(model.layers, layers, strict=True):
        weights = {k: v.float() for k, v in target.layer(index).items()}
        # NOTE: the block rows also pass these projections, through the layer's own input norm,
        # which therefore becomes the first layer's.
        fold = (weights["input_layernorm.weight"] / first_norm).clamp(0.1, 10.0)
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"self_attn.{name}.weight"] *= fold
        weights["input_layernorm.weight"] = first_norm
        for name in ("k_proj", "v_proj"):
            key = f"self_attn.{name}.weight"
            weights[key] = _repeat_heads(weights[key], model)
        layer.load_state_dict(weights)


@torch.no_grad()
def start_markov_head(
    model: DSparkModel, draft_vocab: Tensor, pairs: np.ndarray, counts: np.ndarray
) -> None:
    """W1, W2 := truncated SVD of log p(next | previous) - log p(next), smoothed, unseen pairs 0."""
    vocab, rank = model.dims.vocab, model.shape.markov_rank
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
def start_embeddings(model: DSparkModel, target: Target, draft_vocab: Tensor) -> None:
    """Final norm := the target's; mask embedding := mean embedding of the draft vocabulary."""
    model.norm.weight.copy_(target.norm.float())
    model.mask_embedding.copy_(target.embedding[draft_vocab].float().mean(0))


def _repeat_heads(weight: Tensor, model: DSparkModel) -> Tensor:
    """[kv · hd, H] of the target -> the drafter's number of KV heads, each copied to its group."""
    heads = weight.view(-1, model.dims.head_dim, weight.shape[1])
    copies = model.shape.num_kv_heads // heads.shape[0]
    return heads.repeat_interleave(copies, dim=0).flatten(0, 1)
