"""What a kernel set offers: packed weights, a decoder stack, and the data they take.

Two sets implement this on a CPU: `kernels.cpu` (numba) and `kernels.reference` (torch, also the
oracle of the tests). Activations are fp32, row-major. A row's result depends on that row alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .draft_chain import ChainRule, Chains, choose_chains


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix as the checkpoint stores it.

    Attributes:
        data: [n, k] float32, bfloat16 or float16; or [n, bytes per row] uint8 GGUF blocks.
        type: GGUF's name of the type: "F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0",
            "Q5_1", "Q4_K", "Q5_K", "Q6_K".
        shape: (n, k): n outputs, k inputs.
    """

    data: Tensor
    type: str
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One Llama-like block: attention and gated MLP, each with a residual.

    Attributes:
        input_norm: [k of qkv] fp32, `None` when the block takes its input as it is.
        qkv: rows of q, then k, then v: [(heads + 2 * kv_heads) * head_dim, k]. Each part may be a
            weight of its own type. k is hidden, or 2 * hidden where the first layer takes a pair.
        qkv_bias: [(heads + 2 * kv_heads) * head_dim] fp32 or `None`.
        q_norm, k_norm: [head_dim] fp32 per-head RMSNorm (Qwen3) or `None`.
        o, o_bias: [hidden, heads * head_dim]; [hidden] fp32 or `None`.
        post_norm: [hidden] fp32.
        gate, up: [intermediate, hidden]; down: [hidden, intermediate]. mlp biases are not built.
    """

    input_norm: Tensor | None
    qkv: tuple[Weight, Weight, Weight]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    post_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes all layers of a stack share.

    Attributes:
        rope_cos, rope_sin: [max_positions, head_dim / 2] fp32, scaling included (neox pairing:
            element i turns with element i + head_dim / 2).
        attention_scale: factor of q.k, head_dim ** -0.5 for the built families.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    attention_scale: float
    rope_cos: Tensor
    rope_sin: Tensor


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """K and V of the layers of one stack; a slot is page * page_size + offset.

    Blocks of 16 consecutive positions never cross a page. Layouts (fp32 or bf16):

    Attributes:
        k: [num_layers, num_pages, page_size / 16, kv_heads, head_dim, 16], blocks transposed.
        v: [num_layers, num_pages, page_size / 16, kv_heads, 16, head_dim].
    """

    k: Tensor
    v: Tensor

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.k.shape[2] * 16


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Where each row sits and what it attends to; fields as in `batch.ForwardBatch`.

    `kv_lens` may exceed position + 1 (rows of a non-causal draft block see their whole block).
    Rows of one request are adjacent. Attention reads all K/V of the step back from the pool.
    """

    positions: Tensor  # [num_rows] int32
    row_to_req: Tensor  # [num_rows] int32
    out_slots: Tensor  # [num_rows] int64
    page_table: Tensor  # [requests of the pool, max_pages] int32, a row per `row_to_req`
    kv_lens: Tensor  # [num_rows] int32
    tail_starts: Tensor | None = None  # [num_rows] int32
    tail_slots: Tensor | None = None  # [num_rows, max_tail] int64


class ContextRows(NamedTuple):
    """Positions whose K/V comes from features, the same for every layer (DSpark/DFlash injection).

    c = RMSNorm(projection(features)); for each layer K = rope(k_norm(W_k c)), V = W_v c (biases
    included, no input norm).

    Attributes:
        features: [m, k] fp32.
        projection: k to hidden, without bias, of the stack's kernel set.
        norm: [hidden] fp32.
        positions: [m] int32. out_slots: [m] int64.
    """

    features: Tensor
    projection: PackedLinear
    norm: Tensor
    positions: Tensor
    out_slots: Tensor


class PackedLinear(ABC):
    """y = x W^T (+ bias) with a packed weight."""

    shape: tuple[int, int]

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [m, k] fp32 contiguous -> [m, n] fp32, newly allocated. Row-invariant."""


class DecoderStack(ABC):
    """Consecutive Llama-like layers that run as one call."""

    @abstractmethod
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
        """Run all layers, writing K/V of every row to its `out_slots`.

        Args:
            x: [m, hidden] fp32 residual stream (embeddings); not modified.
            rows: see `AttentionRows`.
            kv: pool buffers of exactly this stack's layers.
            capture: layer indices whose outputs (residual stream after the layer) to return;
                -1 is `x` itself. In ascending order, no duplicates.
            first_input: [m, k] fp32 normed input of layer 0's qkv, used instead of input_norm(x).
            final_norm: [hidden] fp32 weight of an RMSNorm of the returned rows.

        Returns:
            ([m, hidden] residual stream after the last layer, normed if there is a `final_norm`,
            [m, len(capture) * hidden] or `None`).
        """

    @abstractmethod
    def write_context(self, context: ContextRows, kv: KVBuffers) -> None:
        """Fill K/V of every layer at some positions; see `ContextRows`."""

    def forward_to_logits(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        *,
        final_norm: Tensor,
        head: PackedLinear,
        context: ContextRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`write_context`, `forward` and a head, which a kernel set may run as one call.

        Args:
            head: hidden to vocabulary, without bias, of the same kernel set.
            context: K/V that the rows see, written first.

        Returns ([m, hidden] normed rows, [m, n of the head] fp32 logits, newly allocated).
        """
        if context is not None:
            self.write_context(context, kv)
        hidden, _ = self.forward(x, rows, kv, final_norm=final_norm)
        return hidden, head(hidden)

    def draft_chains(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        *,
        final_norm: Tensor,
        head: PackedLinear,
        rule: ChainRule,
        first_row: int,
        num_steps: int,
        context: ContextRows | None = None,
    ) -> Chains:
        """`forward_to_logits`, then drafts from them, which a kernel set may run as one call.

        Args:
            rows: n blocks of as many rows each, one per chain of `rule`.
            first_row: the row of a block that gives its first draft; the next ones follow.
            num_steps: drafts per chain.
        """
        parts = self.forward_to_logits(
            x, rows, kv, final_norm=final_norm, head=head, context=context
        )
        num_chains, end = len(rule.previous), first_row + num_steps
        hidden, logits = (
            part.view(num_chains, -1, part.shape[1])[:, first_row:end] for part in parts
        )
        return choose_chains(logits, hidden, rule)


class KernelSet(ABC):
    """A backend: everything the layers need on one device."""

    name: str

    @property
    def is_lossy(self) -> bool:
        """Some product is rounded more than fp32 arithmetic rounds it."""
        return False

    @abstractmethod
    def linear(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        """Pack a weight."""

    @abstractmethod
    def decoder_stack(self, layers: list[LayerWeights], shape: StackShape) -> DecoderStack:
        """Pack layers."""

    @abstractmethod
    def embedding(self, weight: Weight, token_ids: Tensor) -> Tensor:
        """Rows `token_ids` [m] of the (unpacked) weight, widened: [m, k] fp32."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[m, k] fp32 -> [m, k] fp32, newly allocated. Row-invariant."""

    @abstractmethod
    def move_kv(self, kv: KVBuffers, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy K/V of every layer from `src_slots` to `dst_slots` ([n] int64 each, in order)."""
