"""First values of EAGLE-3 and MTP drafters: what the target itself would do next, where linear.

The drafter's layer starts as the target's layer t + 1, and what feeds it as the best linear guess
of that layer's input at the next position. Closed form; nothing is trained.
"""

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import FeatureCache, FeatureSequence
from .draft_layer import DraftLayer
from .eagle3_model import Eagle3Model
from .mtp_model import MtpModel
from .target import Target

BLOCK = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
TO_STREAM = ("mlp.down_proj", "self_attn.o_proj")  # their outputs are added to the residual
RIDGE = 1e-2  # of the mean square of an input
NUM_SEQUENCES = 96  # enough rows for a few thousand inputs
QUIET = 0.4  # of the target's final norm: a guess that is less sure costs less where it is wrong


@torch.no_grad()
def start_heads(model: MtpModel, target: Target, cache: FeatureCache) -> None:
    """Every head := the target layer behind the cache's last tap, on a guess of that tap."""
    sequences, layer_id = _some(cache), cache.layers[-1]
    inputs = torch.cat([_pairs(s, target) for s in sequences])
    wanted, scale = _next_taps(sequences)
    for head in model.heads:
        assert isinstance(head, DraftLayer)
        head.get_parameter("eh_proj.weight").copy_(_fit(inputs, wanted))
        names = [*BLOCK, "input_layernorm", *(f"self_attn.{part}_proj" for part in "qkvo")]
        _copy(head, target, layer_id + 1, names, scale)
        head.get_parameter("shared_head.norm.weight").copy_(QUIET * target.norm)


@torch.no_grad()
def start_midlayer(model: Eagle3Model, target: Target, cache: FeatureCache) -> None:
    """fc := a guess of the last tap one position later; MLP := that of the target's next layer.

    The attention, which alone sees the next token, starts small and random.
    """
    sequences, layer_id = _some(cache), cache.layers[-1]
    taps = torch.cat([s.taps[:-1].flatten(1).float() for s in sequences]) / model.tap_scale
    wanted, scale = _next_taps(sequences)
    model.fc.weight.copy_(_fit(taps, wanted))
    _copy(model.midlayer, target, layer_id + 1, BLOCK, scale)
    model.norm.weight.copy_(QUIET * target.norm)


def _copy(layer: DraftLayer, target: Target, index: int, names: Seq[str], scale: float) -> None:
    """Weights of a target layer that fit, for a residual stream divided by `scale`."""
    if index >= int(target.number("num_hidden_layers")):
        return
    weights = target.layer(index)
    for name in names:
        mine, theirs = layer.get_parameter(f"{name}.weight"), weights[f"{name}.weight"].float()
        if mine.shape == theirs.shape:
            mine.copy_(theirs / scale if name in TO_STREAM else theirs)


def _fit(inputs: Tensor, wanted: Tensor) -> Tensor:
    """W [out, in] of the ridge regression wanted ≈ inputs Wᵀ."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    solved: Tensor = torch.linalg.solve(gram, inputs.T @ wanted)
    return solved.T


def _some(cache: FeatureCache) -> list[FeatureSequence]:
    return [cache[i] for i in range(min(NUM_SEQUENCES, len(cache)))]


def _next_taps(sequences: Seq[FeatureSequence]) -> tuple[Tensor, float]:
    """[rows, H] last tap one position after each row, divided by its size, and that size."""
    taps = torch.cat([s.taps[1:, -1].float() for s in sequences])
    scale = float(taps.square().mean().sqrt())
    return taps / scale, scale


def _pairs(sequence: FeatureSequence, target: Target) -> Tensor:
    """[S - 1, 2 * H] what a head joins at each row: the next token's embedding and the hidden."""
    embedded = F.embedding(sequence.token_ids[1:].long(), target.embedding).float()
    halves = (embedded, sequence.last[:-1].float())
    return torch.cat([F.rms_norm(half, half.shape[-1:]) for half in halves], dim=1)
