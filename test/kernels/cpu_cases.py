"""Weights, layers, pools and rows that the tests of the compiled kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import gguf
import numpy as np
import torch
from torch import Tensor

from truespec.env import cache_dir
from truespec.kernels.api import AttentionRows, KVBuffers, LayerWeights, StackShape, Weight
from truespec.kernels.cpu import CpuKernels
from truespec.kernels.cpu.compile import Cpu

NAN = float("nan")
FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# bytes per block of 256 weights, byte offsets of fp16 factors
K_BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


@cache
def kernels(num_threads: int = 1, cpu: Cpu | None = None, *, is_lossy: bool = False) -> CpuKernels:
    """A kernel set of the whole test run."""
    return CpuKernels(
        cache_dir(), num_threads=num_threads, cpu=cpu, lossy_int8_activations=is_lossy
    )


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make_weight(type_name: str, n: int, k: int, seed: int = 0) -> Weight:
    """A random weight; quantised types by the gguf library, K-quants from random blocks."""
    if type_name in FLOAT_TYPES:
        data = (normal(n, k, seed=seed) / k**0.5).to(FLOAT_TYPES[type_name])
        return Weight(data, type_name, (n, k))
    if type_name not in K_BLOCKS:
        values = (normal(n, k, seed=seed) / k**0.5).numpy()
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
        return Weight(torch.from_numpy(blocks), type_name, (n, k))
    block_bytes, factors = K_BLOCKS[type_name]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (n, k // 256, block_bytes), dtype=np.uint8)
    for offset in factors:
        factor = generator.uniform(-0.02, 0.02, (n, k // 256, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = factor.view(np.uint8)
    return Weight(torch.from_numpy(blocks.reshape(n, -1)), type_name, (n, k))


def dequantised(weight: Weight) -> Tensor:
    """[n, k] fp32 by the gguf library."""
    if weight.type in FLOAT_TYPES:
        return weight.data.float()
    values = gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[weight.type])
    return torch.from_numpy(values)


@dataclass(frozen=True)
class Model:
    """Sizes of a stack under test."""

    hidden: int = 64
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 16
    inner: int = 96
    layers: int = 2
    type_name: str = "F32"
    biases: bool = False
    head_norms: bool = False
    max_positions: int = 2048

    def shape(self) -> StackShape:
        half = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(self.max_positions).unsqueeze(1) * 10000.0**-half
        return StackShape(
            self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, 1e-5,
            self.head_dim**-0.5, angles.cos(), angles.sin(),
        )  # fmt: skip

    def weights(self, *, qkv_inputs: int | None = None) -> list[LayerWeights]:
        return [self._layer(i, qkv_inputs if i == 0 else None) for i in range(self.layers)]

    def pool(self, num_pages: int, page_size: int = 16, dtype: torch.dtype = torch.float32):
        """A pool whose every slot is NaN until it is written."""
        head = (self.layers, num_pages, page_size // 16, self.kv_heads)
        return KVBuffers(
            torch.full((*head, self.head_dim, 16), NAN, dtype=dtype),
            torch.full((*head, 16, self.head_dim), NAN, dtype=dtype),
        )

    def _layer(self, seed: int, qkv_inputs: int | None) -> LayerWeights:
        q, kv, k = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        sizes = [
            (q, k),
            (kv, k),
            (kv, k),
            (k, q),
            (self.inner, k),
            (self.inner, k),
            (k, self.inner),
        ]
        if qkv_inputs is not None:
            sizes[:3] = [(n, qkv_inputs) for n, _ in sizes[:3]]
        made = [make_weight(self.type_name, n, m, 10 * seed + i) for i, (n, m) in enumerate(sizes)]
        norms = [1 + 0.1 * normal(n, seed=seed) for n in (k, self.head_dim, self.head_dim + 0, k)]
        return LayerWeights(
            input_norm=norms[0] if qkv_inputs is None else None,
            qkv=(made[0], made[1], made[2]),
            qkv_bias=normal(q + 2 * kv, seed=seed) if self.biases else None,
            q_norm=norms[1] if self.head_norms else None,
            k_norm=norms[2] * 0.9 if self.head_norms else None,
            o=made[3],
            o_bias=normal(k, seed=seed + 1) if self.biases else None,
            post_norm=norms[3],
            gate=made[4],
            up=made[5],
            down=made[6],
        )


def page_table(num_requests: int, pages_each: int, seed: int = 0) -> Tensor:
    """[bs, pages] int32, pages in no order."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randperm(num_requests * pages_each, generator=generator).int().view(num_requests, -1)
    )


def causal_rows(table: Tensor, parts: list[tuple[int, int, int]], page_size: int) -> AttentionRows:
    """Rows of `parts`: (request, first position, end position)."""
    positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
    counts = torch.tensor([end - start for _, start, end in parts])
    reqs = torch.tensor([req for req, _, _ in parts]).repeat_interleave(counts)
    return AttentionRows(
        positions=positions.int(),
        row_to_req=reqs.int(),
        out_slots=slots_of(table, reqs, positions, page_size),
        page_table=table,
        kv_lens=positions.int() + 1,
    )


def slots_of(table: Tensor, reqs: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Pool slots of positions of requests."""
    return table[reqs, positions // page_size].long() * page_size + positions % page_size


def in_chunks(total: int, sizes: list[int]) -> list[tuple[int, int]]:
    """[start, end) of consecutive chunks; the sizes repeat until `total` is reached."""
    cuts = [0]
    while cuts[-1] < total:
        cuts.append(min(total, cuts[-1] + sizes[(len(cuts) - 1) % len(sizes)]))
    return list(pairwise(cuts))
