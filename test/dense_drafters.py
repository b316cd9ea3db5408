"""Dense float64 arithmetic of Llama-like layers, straight from the formulas, and a tiny target.

Independent of the package: it reads the tensors that a test has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from paged import kv_buffers, shuffled_pages
from tiny import tiny_checkpoint
from tiny_drafters import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TARGET_LAYERS, VOCAB
from truespec.kernels.api import AttentionRows, KVBuffers
from truespec.kernels.reference import ReferenceKernels
from truespec.models.layer_weights import stack_shape
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model

THETA, EPS = 10000.0, 1e-6
NUM_PAGES = 4


def tiny_target(directory: Path) -> CausalLM:
    """A target that the drafters of `tiny_drafters` fit."""
    tiny_checkpoint(
        directory,
        "llama",
        seed=5,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=TARGET_LAYERS,
    )
    return load_model(directory, ReferenceKernels())


def stored(directory: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors in float64, and the config."""
    tensors = load_file(directory / "model.safetensors")
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    return wide, json.loads((directory / "config.json").read_text(encoding="utf-8"))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last dimension."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [n, heads, head_dim]: element i turns with element i + head_dim / 2."""
    half = HEAD_DIM // 2
    angle = positions.double()[:, None, None] / THETA ** (torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One layer under `prefix` of `tensors`."""

    tensors: Mapping[str, Tensor]
    prefix: str

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T, with the bias if there is one."""
        bias = self.tensors.get(f"{self.prefix}{name}.bias")
        y = x @ self.tensors[f"{self.prefix}{name}.weight"].T
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm with a weight of this layer."""
        return rms(x, self.tensors[f"{self.prefix}{name}.weight"])

    def _heads(self, part: str, x: Tensor, positions: Tensor) -> Tensor:
        y = self.linear(f"self_attn.{part}_proj", x).view(len(x), -1, HEAD_DIM)
        if f"{self.prefix}self_attn.{part}_norm.weight" in self.tensors:
            y = self.norm(f"self_attn.{part}_norm", y)
        return rope(y, positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of normed inputs x: [n, heads, head_dim] each, repeated for every query head."""
        values = self.linear("self_attn.v_proj", x).view(len(x), KV_HEADS, HEAD_DIM)
        keys = self._heads("k", x, positions)
        repeats = HEADS // KV_HEADS
        return keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)

    def run(
        self,
        residual: Tensor,
        x: Tensor,
        positions: Tensor,
        kv: tuple[Tensor, Tensor],
        sees: Tensor,
    ) -> Tensor:
        """Attention over given keys and values, and the MLP.

        Args:
            residual: [n, H]; x: [n, k] normed input of q; sees: [n, keys] bool.
        """
        q = self._heads("q", x, positions)
        scores = torch.einsum("nhd,mhd->hnm", q, kv[0]) / HEAD_DIM**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        attended = torch.einsum("hnm,mhd->nhd", weights, kv[1]).reshape(len(q), -1)
        residual = residual + self.linear("self_attn.o_proj", attended)
        y = self.norm("post_attention_layernorm", residual)
        gate = torch.nn.functional.silu(self.linear("mlp.gate_proj", y))
        return residual + self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", y))

    def run_causal(self, residual: Tensor, x: Tensor) -> Tensor:
        """A whole sequence from position 0 on."""
        n = len(x)
        positions = torch.arange(n)
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        return self.run(residual, x, positions, self.keys_values(x, positions), sees)


def draft_pool(target: CausalLM, num_layers: int) -> tuple[KVBuffers, Tensor]:
    """Draft K/V of NaN, and a page table in no order."""
    shape = stack_shape(target.config)
    return kv_buffers(num_layers, shape, NUM_PAGES), shuffled_pages(NUM_PAGES)


def rows_at(positions: Tensor, page_table: Tensor, kv_lens: Tensor | None = None) -> AttentionRows:
    """Rows of one request at `positions`; causal unless `kv_lens` says otherwise."""
    pages = page_table[0, positions // 16].long()
    return AttentionRows(
        positions=positions.int(),
        row_to_req=torch.zeros(len(positions), dtype=torch.int32),
        out_slots=pages * 16 + positions % 16,
        page_table=page_table,
        kv_lens=positions.int() + 1 if kv_lens is None else kv_lens.int(),
    )
