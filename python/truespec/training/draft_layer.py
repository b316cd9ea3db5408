"""One Llama block for training drafters on packed rows: bf16 products, fp32 residual stream.

Knows rows, positions and keys; knows no drafter. Weights are fp32 parameters, cast once a batch.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from .chains import ChainBatch
from .dspark_model import Dims, Mlp

KeysValues = tuple[Tensor, Tensor]  # [n, kv, hd] bf16 each, keys rotated


class Span(NamedTuple):
    """Rows of one sequence, its keys, and which of them each row does not see."""

    rows: slice
    keys: slice
    is_hidden: Tensor  # [rows, keys] bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables, [positions, 1, hd / 2] fp32."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, hd] by halves, computed in fp32, kept in x's dtype."""
        out: Tensor = _Rotate.apply(x, self.cos[positions], self.sin[positions])  # type: ignore[no-untyped-call]  # torch stub
        return out


def make_rope(dims: Dims, num_positions: int, device: torch.device) -> Rope:
    exponents = torch.arange(0, dims.head_dim, 2, device=device).float() / dims.head_dim
    positions = torch.arange(num_positions, device=device).float()
    angles = positions.unsqueeze(1) / dims.rope_theta**exponents
    return Rope(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[n, H] fp32 or bf16 -> [n, H] bf16."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch stub
    return out


def causal_spans(batch: ChainBatch, rows: Tensor, sequences: Tensor) -> list[Span]:
    """Each row of `rows` (packed, grouped by sequence) sees its sequence up to itself.

    sequences: [len(rows)] int64 index of each row's sequence, ascending.
    """
    counts = torch.bincount(sequences, minlength=len(batch.lens)).tolist()
    spans, first_row, first_key = [], 0, 0
    for count, length in zip(counts, batch.lens.tolist(), strict=True):
        chosen = slice(first_row, first_row + count)
        keys = slice(first_key, first_key + length)
        places = torch.arange(first_key, first_key + length, device=rows.device)
        is_hidden = places > rows[chosen].unsqueeze(1)
        spans.append(Span(chosen, keys, is_hidden))
        first_row, first_key = first_row + count, first_key + length
    return spans


def attend(q: Tensor, keys: KeysValues, own: Seq[KeysValues], spans: Seq[Span]) -> Tensor:
    """One softmax over a sequence's keys and, per row, over keys of that row alone.

    q [R, h, hd], keys of all N packed rows, own one entry per earlier step, for the R rows
    -> [R, h * hd]. Query head i reads KV head i // (h / kv).
    """
    k, v = keys
    num_rows, num_heads, head_dim = q.shape
    num_groups = k.shape[1]
    q = (q * head_dim**-0.5).view(num_rows, num_groups, num_heads // num_groups, head_dim)
    own_scores = [(q * own_k.unsqueeze(2)).sum(-1, keepdim=True) for own_k, _ in own]
    parts, own_weights = [], []
    for span in spans:
        rows, width = q[span.rows].transpose(0, 1), span.is_hidden.shape[1]  # [kv, r, g, hd]
        scores = rows.flatten(1, 2) @ k[span.keys].permute(1, 2, 0)
        scores = scores.view(*rows.shape[:3], width)
        scores = scores.masked_fill(span.is_hidden.unsqueeze(1), float("-inf"))
        extra = [score[span.rows].transpose(0, 1) for score in own_scores]
        weights = torch.cat([scores, *extra], -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        mixed = weights[..., :width].flatten(1, 2) @ v[span.keys].transpose(0, 1)
        parts.append(mixed.view(rows.shape).transpose(0, 1))
        own_weights.append(weights[..., width:].transpose(0, 1))
    out = torch.cat(parts)
    for step, (_, own_v) in enumerate(own):
        weight = torch.cat([w[..., step : step + 1] for w in own_weights])
        out = out + weight * own_v.unsqueeze(2)
    return out.reshape(num_rows, num_heads * head_dim)


class DraftLayer(nn.Module):
    """Parameters of a Llama block, named as in checkpoints; `input_layernorm` is the caller's.

    Args:
        attention_input: width of what the attention reads.
    """

    def __init__(self, dims: Dims, num_kv_heads: int, attention_input: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dims.hidden, dims.eps)
        self.self_attn = _Attention(dims, num_kv_heads, attention_input)
        self.post_attention_layernorm = nn.RMSNorm(dims.hidden, dims.eps)
        self.mlp = Mlp(dims)

    def cast(self) -> "CastLayer":
        """bf16 weights for one batch."""
        a, m = self.self_attn, self.mlp
        return CastLayer(
            self,
            q=a.q_proj.weight.bfloat16(),
            kv=torch.cat([a.k_proj.weight, a.v_proj.weight]).bfloat16(),
            o=a.o_proj.weight.bfloat16(),
            gate_up=torch.cat([m.gate_proj.weight, m.up_proj.weight]).bfloat16(),
            down=m.down_proj.weight.bfloat16(),
            head_dim=a.head_dim,
        )


@dataclass(frozen=True, slots=True)
class CastLayer:
    """A layer during one batch."""

    source: DraftLayer
    q: Tensor
    kv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    head_dim: int

    def queries(self, x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
        """[n, attention_input] bf16 -> [n, h, hd]."""
        return rope.rotate(F.linear(x, self.q).view(len(x), -1, self.head_dim), positions)

    def keys_values(self, x: Tensor, rope: Rope, positions: Tensor) -> KeysValues:
        k, v = F.linear(x, self.kv).view(len(x), 2, -1, self.head_dim).unbind(1)
        return rope.rotate(k, positions), v

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and MLP; residual [n, H] fp32, mixed [n, h * hd] bf16 -> [n, H]."""
        norm = self.source.post_attention_layernorm
        x = residual + F.linear(mixed, self.o)
        gate, up = F.linear(rms_norm(x, norm.weight, norm.eps or 0.0), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class _Attention(nn.Module):
    def __init__(self, dims: Dims, num_kv_heads: int, width: int) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        inner, kv = dims.num_heads * dims.head_dim, num_kv_heads * dims.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(inner, dims.hidden, bias=False)


class _Rotate(torch.autograd.Function):
    """Rotary embedding; its gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]  # missing in the stubs
        return _turn(grads[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """y = w · x / rms(x) in fp32, given as bf16: fewer passes than autograd's own."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).bfloat16()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors  # type: ignore[attr-defined]  # missing in the stubs
        grad = grads[0].float()
        normed = x.float() * inverse
        grad_weight = (grad * normed).sum(0)
        grad = grad * weight
        along = (grad * normed).mean(-1, keepdim=True)
        return normed.mul_(-along).add_(grad).mul_(inverse).to(x.dtype), grad_weight, None
