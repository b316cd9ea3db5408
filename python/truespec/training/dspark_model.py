"""DSpark and DFlash drafters as plain torch modules, for training only.

Serving runs the same checkpoint on the engine's kernels.
Shapes: B sequences of S context tokens, A blocks per sequence, G = block size rows, m taps.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import BlockBatch
from .config import DFlashShape, DSparkShape
from .target import Target

Rope = tuple[Tensor, Tensor]  # cos and sin [..., 1, hd], broadcast over heads


@dataclass(frozen=True, slots=True)
class Dims:
    """Numbers that a drafter copies from its target."""

    hidden: int
    intermediate: int
    num_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float


def dims_of(target: Target) -> Dims:
    heads = int(target.number("num_attention_heads"))
    return Dims(
        hidden=target.hidden_size,
        intermediate=int(target.number("intermediate_size")),
        num_heads=heads,
        head_dim=int(str(target.config.get("head_dim") or target.hidden_size // heads)),
        vocab=target.embedding.shape[0],
        eps=target.number("rms_norm_eps"),
        rope_theta=target.rope_theta,
    )


class BlockModel(nn.Module):
    """What block drafters share, and all of DFlash; parameter names are those of the checkpoint.

    `tap_scale` [m * H] is a fixed preconditioner: `fc` acts on taps divided by it. Exporting folds
    it into `fc`.
    """

    tap_scale: Tensor

    def __init__(self, shape: DSparkShape | DFlashShape, dims: Dims) -> None:
        super().__init__()
        num_taps = len(shape.target_layer_ids)
        self.shape, self.dims = shape, dims
        self.fc = nn.Linear(num_taps * dims.hidden, dims.hidden, bias=False)
        self.hidden_norm = RMSNorm(dims.hidden, dims.eps)
        self.layers = nn.ModuleList(
            _Layer(dims, shape.num_kv_heads) for _ in range(shape.num_layers)
        )
        self.norm = RMSNorm(dims.hidden, dims.eps)
        self.mask_embedding = nn.Parameter(torch.zeros(dims.hidden))
        self.register_buffer("tap_scale", torch.ones(num_taps * dims.hidden))
        _randomize(self)

    def markov_rows(self, previous: Tensor) -> Tensor:
        """[..., r] by which the tokens before the drafts bias their logits; DFlash has r = 0."""
        return torch.zeros(*previous.shape, 0, device=previous.device)

    def markov_weight(self) -> Tensor:
        """[DV, r]: the bias is `markov_weight · markov_rows`."""
        return torch.zeros(self.shape.draft_vocab_size, 0, device=self.fc.weight.device)

    def forward(self, taps: Tensor, anchors: Tensor, anchor_embeds: Tensor) -> Tensor:
        """Post-norm hidden of every block row.

        taps [B, S, m, H] of positions 0..S-1 (rows past a sequence's end may hold anything finite),
        anchors [B, A] int64 positions of the anchor tokens, anchor_embeds [B, A, H]
        -> [B, A, G, H]; row i of a block predicts the token at anchor + 1 + i. A block sees the
        context before its anchor, strictly, and all of its own rows.
        """
        context_len, size = taps.shape[1], self.shape.block_size
        context = F.linear(taps.flatten(2), self.fc.weight / self.tap_scale)
        context = self.hidden_norm(context)
        masks = self.mask_embedding.to(anchor_embeds.dtype).expand(*anchors.shape, size - 1, -1)
        x = torch.cat([anchor_embeds.unsqueeze(2), masks], dim=2).flatten(1, 2)  # [B, A * G, H]
        positions = anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)
        block_rope = self._rope_table(positions.flatten(1))
        context_rope = self._rope_table(torch.arange(context_len, device=anchors.device))
        bias = block_bias(anchors, context_len, size).to(x.dtype)
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, bias)
        return torch.unflatten(self.norm(x), 1, (-1, size))

    def _rope_table(self, positions: Tensor) -> Rope:
        """cos and sin [..., 1, hd] of positions [...], broadcast over heads."""
        pairs = torch.arange(0, self.dims.head_dim, 2, device=positions.device)
        exponents = pairs.float() / self.dims.head_dim
        angles = positions.unsqueeze(-1).float() / self.dims.rope_theta**exponents
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos(), angles.sin()


class DSparkModel(BlockModel):
    """With a Markov head and a confidence head."""

    def __init__(self, shape: DSparkShape, dims: Dims) -> None:
        super().__init__(shape, dims)
        self.markov_head = _MarkovHead(dims.vocab, shape.draft_vocab_size, shape.markov_rank)
        self.confidence_head = _ConfidenceHead(dims.hidden + shape.markov_rank)
        _randomize(self.markov_head)
        _randomize(self.confidence_head)

    def markov_rows(self, previous: Tensor) -> Tensor:
        rows: Tensor = self.markov_head.markov_w1(previous)
        return rows

    def markov_weight(self) -> Tensor:
        return self.markov_head.markov_w2.weight


def forward_blocks(model: BlockModel, batch: BlockBatch, embedding: Tensor) -> Tensor:
    """Post-norm hidden of all block rows; [B, A, G, H]."""
    anchor_embeds = F.embedding(batch.token_ids.gather(1, batch.anchors), embedding)
    # NOTE: autocast's cache of cast weights is shared by all threads and emptied by each: with it,
    # the order in which gradients are added, and so their rounding, depends on timing.
    with torch.autocast(batch.taps.device.type, torch.bfloat16, cache_enabled=False):
        hidden: Tensor = model(batch.taps, batch.anchors, anchor_embeds)
    return hidden


def block_bias(anchors: Tensor, context_len: int, block_size: int) -> Tensor:
    """[B, 1, A * G, S + A * G] fp32: 0 where a block row sees a key, -inf elsewhere.

    Keys are the S context positions, then the rows of all blocks.
    """
    num_rows = anchors.shape[1] * block_size
    places = torch.arange(context_len, device=anchors.device)
    context = places < anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)  # [B, A * G, S]
    block = torch.arange(num_rows, device=anchors.device) // block_size
    own = (block == block.unsqueeze(-1)).expand(len(anchors), -1, -1)
    visible = torch.cat([context, own], dim=-1).unsqueeze(1)
    return torch.zeros(visible.shape, device=anchors.device).masked_fill(~visible, float("-inf"))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: mixed dtypes have no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _MarkovHead(nn.Module):
    """Bias on the draft logits that depends on the previous token: `W2 · W1[previous]`."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)


class _ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class _Layer(nn.Module):
    def __init__(self, dims: Dims, num_kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.self_attn = _Attention(dims, num_kv_heads)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = Mlp(dims)

    def forward(
        self, x: Tensor, context: Tensor, block_rope: Rope, context_rope: Rope, bias: Tensor
    ) -> Tensor:
        rows = self.input_layernorm(x)
        x = x + self.self_attn(rows, context, block_rope, context_rope, bias)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, dims: Dims, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.groups = dims.num_heads // num_kv_heads
        width = dims.num_heads * dims.head_dim
        self.q_proj = nn.Linear(dims.hidden, width, bias=False)
        self.k_proj = nn.Linear(dims.hidden, num_kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(dims.hidden, num_kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(width, dims.hidden, bias=False)

    def forward(
        self, rows: Tensor, context: Tensor, block_rope: Rope, context_rope: Rope, bias: Tensor
    ) -> Tensor:
        """rows [B, A * G, H], context [B, S, H] -> [B, A * G, H]; one softmax over both."""
        q = _rotate(self._heads(self.q_proj(rows)), block_rope)
        keys = (
            _rotate(self._heads(self.k_proj(context)), context_rope),
            _rotate(self._heads(self.k_proj(rows)), block_rope),
        )
        values = (self._heads(self.v_proj(context)), self._heads(self.v_proj(rows)))
        k, v = (self._repeat(torch.cat(part, dim=1)).transpose(1, 2) for part in (keys, values))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads

    def _repeat(self, x: Tensor) -> Tensor:
        """KV heads [..., kv, hd] -> query heads [..., h, hd]."""
        return x if self.groups == 1 else x.repeat_interleave(self.groups, dim=-2)


class Mlp(nn.Module):
    """The gated MLP of a Llama block."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.down_proj = nn.Linear(dims.intermediate, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _randomize(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding by halves; x [..., heads, hd], computed in fp32, kept in x's dtype."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)
