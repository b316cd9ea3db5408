"""The EAGLE-3 drafter (arXiv 2503.01840) as a plain torch module, for training only.

Symbols: e embedding of the next token, f fused feature of the target, g output carried on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chains import ChainBatch
from .draft_layer import DraftLayer, KeysValues, attend, causal_spans, make_rope, rms_norm
from .dspark_model import Dims
from .eagle_config import Eagle3Shape


class Eagle3Model(nn.Module):
    """One layer over [norm(e); norm(f)]; parameter names are those of the checkpoint.

    `tap_scale` [m * H] is a fixed preconditioner: `fc` acts on taps divided by it. Exporting folds
    it into `fc`.
    """

    tap_scale: Tensor

    def __init__(self, shape: Eagle3Shape, dims: Dims) -> None:
        super().__init__()
        num_taps = len(shape.target_layer_ids)
        self.shape, self.dims = shape, dims
        self.fc = nn.Linear(num_taps * dims.hidden, dims.hidden, bias=False)
        self.midlayer = _MidLayer(dims, shape.num_kv_heads)
        self.norm = nn.RMSNorm(dims.hidden, dims.eps)
        self.register_buffer("tap_scale", torch.ones(num_taps * dims.hidden))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)


def forward_chains(model: Eagle3Model, batch: ChainBatch, embedding: Tensor) -> list[Tensor]:
    """Post-norm hidden of every draft, fed with the true tokens: per step [alive chains, H] bf16.

    Step j > 0 of a chain sees the target's features up to the chain's first row, and its own
    steps 1..j: what a draft sees.
    """
    layer, eps = model.midlayer, model.dims.eps
    cast, positions = layer.cast(), batch.positions
    device, num_positions = positions.device, int(batch.lens.max()) + model.shape.num_drafts
    rope = make_rope(model.dims, num_positions, device)

    def join(token_ids: Tensor, feature: Tensor) -> Tensor:
        embedded = rms_norm(F.embedding(token_ids, embedding), layer.input_layernorm.weight, eps)
        return torch.cat([embedded, rms_norm(feature, layer.hidden_norm.weight, eps)], dim=1)

    features = F.linear(batch.taps.flatten(1), (model.fc.weight / model.tap_scale).bfloat16())
    joined = join(batch.tokens_after(torch.arange(len(features), device=device), 1), features)
    keys = cast.keys_values(joined, rope, positions)
    alive, rows = torch.arange(len(batch.rows), device=device), batch.rows
    hidden = features[rows].float()
    joined = joined[rows]
    own: list[KeysValues] = []
    outputs = []
    for step in range(model.shape.num_drafts):
        if step > 0:
            kept = (batch.depths[alive] > step).nonzero().squeeze(1)
            alive, rows, hidden = alive[kept], rows[kept], hidden[kept]
            joined = join(batch.tokens_after(rows, 1 + step), hidden)
            own = [(k[kept], v[kept]) for k, v in own]
            own.append(cast.keys_values(joined, rope, positions[rows] + step))
        q = cast.queries(joined, rope, positions[rows] + step)
        spans = causal_spans(batch, rows, batch.sequences[alive])
        hidden = cast.finish(hidden, attend(q, keys, own, spans))
        outputs.append(rms_norm(hidden, model.norm.weight, eps))
    return outputs


class _MidLayer(DraftLayer):
    def __init__(self, dims: Dims, num_kv_heads: int) -> None:
        super().__init__(dims, num_kv_heads, attention_input=2 * dims.hidden)
        self.hidden_norm = nn.RMSNorm(dims.hidden, dims.eps)
