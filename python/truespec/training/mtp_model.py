"""Chained multi-token-prediction heads as a plain torch module, for training only.

DeepSeek-V3's block (arXiv 2412.19437): u = eh_proj [norm(e); norm(h)], one decoder layer, final
norm. Head j at row i reads token i + 1 + j and head j - 1's output at row i, the target's final
hidden state for j = 0, and predicts token i + 2 + j.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chains import ChainBatch
from .draft_layer import DraftLayer, attend, causal_spans, make_rope, rms_norm
from .dspark_model import Dims
from .eagle_config import MtpShape


class MtpModel(nn.Module):
    """`heads.<j>` have the parameter names of a DeepSeek MTP layer."""

    def __init__(self, shape: MtpShape, dims: Dims) -> None:
        super().__init__()
        self.shape, self.dims = shape, dims
        self.heads = nn.ModuleList(_Head(dims, shape.num_kv_heads) for _ in range(shape.num_heads))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)


def forward_heads(model: MtpModel, batch: ChainBatch, embedding: Tensor) -> list[Tensor]:
    """Post-norm hidden of every draft, fed with the true tokens: per head [alive chains, H] bf16.

    Every head runs on all rows, the last one on rows with a draft alone.
    """
    device, positions = batch.lens.device, batch.positions
    everything = torch.arange(len(positions), device=device)
    sequence_of = torch.arange(len(batch.lens), device=device).repeat_interleave(batch.lens)
    rope = make_rope(model.dims, int(batch.lens.max()), device)
    all_spans = causal_spans(batch, everything, sequence_of)
    hidden, outputs = batch.last, []
    for j, head in enumerate(model.heads):
        assert isinstance(head, _Head)
        joined = head.join(hidden, F.embedding(batch.tokens_after(everything, 1 + j), embedding))
        cast, attended = head.cast(), head.norm("input_layernorm", joined)
        keys = cast.keys_values(attended, rope, positions)
        drafting = batch.rows[batch.alive(j)]
        is_last = j == len(model.heads) - 1
        rows = drafting if is_last else everything
        spans = causal_spans(batch, rows, sequence_of[rows]) if is_last else all_spans
        q = cast.queries(attended[rows], rope, positions[rows])
        out = cast.finish(joined[rows], attend(q, keys, [], spans))
        hidden = rms_norm(out, head.shared_head.norm.weight, model.dims.eps)
        outputs.append(hidden if is_last else hidden[drafting])
    return outputs


class _Head(DraftLayer):
    def __init__(self, dims: Dims, num_kv_heads: int) -> None:
        super().__init__(dims, num_kv_heads, attention_input=dims.hidden)
        self.eps = dims.eps
        self.enorm = nn.RMSNorm(dims.hidden, dims.eps)
        self.hnorm = nn.RMSNorm(dims.hidden, dims.eps)
        self.eh_proj = nn.Linear(2 * dims.hidden, dims.hidden, bias=False)
        self.shared_head = _SharedHead(dims)

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.get_parameter(f"{name}.weight")
        return rms_norm(x, weight, self.eps)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[N, H] each -> [N, H] fp32, the residual stream."""
        pair = torch.cat([self.norm("enorm", embedded), self.norm("hnorm", hidden)], dim=1)
        return F.linear(pair, self.eh_proj.weight.bfloat16()).float()


class _SharedHead(nn.Module):
    """Only the final norm: the projection is the target's."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dims.hidden, dims.eps)
