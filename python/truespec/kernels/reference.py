"""The kernel set in plain torch: the oracle of the compiled kernels, and the engine without them.

Row-invariant on a CPU by running every row-wise operation on exactly 8 rows (padded), so that the
same library kernel runs whatever the batch; `reference_selftest` checks that on the machine at
hand. On a GPU it runs the same operations on all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .api import (
    AttentionRows,
    ContextRows,
    DecoderStack,
    KernelSet,
    KVBuffers,
    LayerWeights,
    PackedLinear,
    StackShape,
    Weight,
)
from .reference_attention import attention, move_slots, store_kv
from .reference_weights import widen, widen_rows

ROWS_PER_CALL = 8


def in_row_blocks(rowwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`rowwise(x)` computed 8 rows at a time on a CPU, the last block padded with zeros.

    Args:
        rowwise: maps [m, k] to [m, n] row by row.
        x: [m, k] fp32.
    """
    m = x.shape[0]
    if x.is_cuda or m == 0:
        return rowwise(x)
    padded = F.pad(x, (0, 0, 0, -m % ROWS_PER_CALL)).contiguous()
    blocks = [rowwise(block.clone()) for block in torch.split(padded, ROWS_PER_CALL)]
    return torch.cat(blocks)[:m]


class ReferenceLinear(PackedLinear):
    """A widened weight and a bias."""

    def __init__(self, weight: Weight, bias: Tensor | None, device: str) -> None:
        """Widen `weight` to fp32 and move both to `device`."""
        self.shape = weight.shape
        self._weight = widen(weight).to(device)
        assert tuple(self._weight.shape) == weight.shape, (self._weight.shape, weight.shape)
        self._bias = None if bias is None else bias.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        return in_row_blocks(lambda rows: F.linear(rows, self._weight, self._bias), x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [m, k] fp32."""

    def rowwise(rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight

    return in_row_blocks(rowwise, x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), [m, k] fp32."""
    k = x.shape[1]
    # NOTE: the library's vector loop and its scalar remainder round differently; a width that is
    # a multiple of every vector length leaves no remainder.
    return in_row_blocks(F.silu, F.pad(x, (0, -k % 64)))[:, :k]


class _Layer:
    """One packed block: the arithmetic between the residual stream and the pool."""

    def __init__(self, weights: LayerWeights, shape: StackShape, kernels: ReferenceKernels) -> None:
        self._shape = shape
        self.input_norm = kernels.place_optional(weights.input_norm)
        self.post_norm = kernels.place(weights.post_norm)
        self._q_norm = kernels.place_optional(weights.q_norm)
        self._k_norm = kernels.place_optional(weights.k_norm)
        sizes = [weight.shape[0] for weight in weights.qkv]
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if weights.qkv_bias is not None:
            biases = torch.split(weights.qkv_bias, sizes)
        self._q, self._k, self._v = (
            kernels.linear(weight, bias) for weight, bias in zip(weights.qkv, biases, strict=True)
        )
        self._o = kernels.linear(weights.o, weights.o_bias)
        self._gate, self._up = kernels.linear(weights.gate), kernels.linear(weights.up)
        self._down = kernels.linear(weights.down)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[m, k] normed input -> rotated queries [m, heads, head_dim]."""
        return self._rotated(self._q(x), self._q_norm, positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[m, k] normed input -> rotated keys and values, [m, kv_heads, head_dim] each."""
        values = self._v(x).view(x.shape[0], -1, self._shape.head_dim)
        return self._rotated(self._k(x), self._k_norm, positions), values

    def output(self, attended: Tensor) -> Tensor:
        """[m, heads * head_dim] -> [m, hidden]."""
        return self._o(attended)

    def mlp(self, x: Tensor) -> Tensor:
        """Gated MLP of the normed residual stream, [m, hidden] -> [m, hidden]."""
        return self._down(silu(self._gate(x)) * self._up(x))

    def _rotated(self, flat: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Split into heads, norm each head if asked, rotate."""
        heads = flat.view(flat.shape[0], -1, self._shape.head_dim)
        if norm is not None:
            normed = rms_norm(heads.flatten(0, 1), norm, self._shape.rms_norm_eps)
            heads = normed.view_as(heads)
        cos = self._shape.rope_cos[positions.long()].unsqueeze(1)
        sin = self._shape.rope_sin[positions.long()].unsqueeze(1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class ReferenceStack(DecoderStack):
    """Layers run one after the other."""

    def __init__(
        self, layers: list[LayerWeights], shape: StackShape, kernels: ReferenceKernels
    ) -> None:
        """Pack `layers`; the rope tables of `shape` are moved to the kernels' device."""
        self._shape = kernels.place_shape(shape)
        self._layers = [_Layer(weights, self._shape, kernels) for weights in layers]

    def forward(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        *,
        capture: tuple[int, ...] = (),
        first_input: Tensor | None = None,
        final_norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `DecoderStack`."""
        captured = [x] if -1 in capture else []
        for index in range(len(self._layers)):
            x = self._forward_layer(index, x, rows, kv, first_input if index == 0 else None)
            if index in capture:
                captured.append(x)
        if final_norm is not None:
            x = rms_norm(x, final_norm.to(x.device), self._shape.rms_norm_eps)
        return x, torch.cat(captured, dim=1) if captured else None

    def write_context(self, context: ContextRows, kv: KVBuffers) -> None:
        """See `DecoderStack`."""
        projected = context.projection(context.features)
        c = rms_norm(projected, context.norm.to(projected.device), self._shape.rms_norm_eps)
        for index, layer in enumerate(self._layers):
            store_kv(kv, index, context.out_slots, *layer.keys_values(c, context.positions))

    def _forward_layer(
        self, index: int, x: Tensor, rows: AttentionRows, kv: KVBuffers, given: Tensor | None
    ) -> Tensor:
        """One block; `given` replaces the normed input."""
        layer, eps = self._layers[index], self._shape.rms_norm_eps
        normed = given if given is not None else x
        if given is None and layer.input_norm is not None:
            normed = rms_norm(x, layer.input_norm, eps)
        q = layer.queries(normed, rows.positions)
        store_kv(kv, index, rows.out_slots, *layer.keys_values(normed, rows.positions))
        attended = attention(q, rows, kv, index, self._shape.attention_scale)
        x = x + layer.output(attended)
        return x + layer.mlp(rms_norm(x, layer.post_norm, eps))


class ReferenceKernels(KernelSet):
    """Plain torch on one device."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        """Compute on `device`: "cpu" or a CUDA device."""
        self.device = device

    def linear(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        """See `KernelSet`."""
        return ReferenceLinear(weight, bias, self.device)

    def decoder_stack(self, layers: list[LayerWeights], shape: StackShape) -> DecoderStack:
        """See `KernelSet`."""
        return ReferenceStack(layers, shape, self)

    def embedding(self, weight: Weight, token_ids: Tensor) -> Tensor:
        """See `KernelSet`."""
        rows = weight.data[token_ids.to(weight.data.device)]
        return widen_rows(rows, weight.type).to(self.device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `KernelSet`."""
        return rms_norm(x, weight.to(x.device), eps)

    def move_kv(self, kv: KVBuffers, src_slots: Tensor, dst_slots: Tensor) -> None:
        """See `KernelSet`."""
        move_slots(kv, src_slots, dst_slots)

    def place(self, tensor: Tensor) -> Tensor:
        """A parameter on this set's device."""
        return tensor.to(self.device)

    def place_optional(self, tensor: Tensor | None) -> Tensor | None:
        """As `place`, for a parameter that a family may lack."""
        return None if tensor is None else self.place(tensor)

    def place_shape(self, shape: StackShape) -> StackShape:
        """`shape` with its tables on this set's device."""
        cos, sin = shape.rope_cos.to(self.device), shape.rope_sin.to(self.device)
        return replace(shape, rope_cos=cos, rope_sin=sin)
