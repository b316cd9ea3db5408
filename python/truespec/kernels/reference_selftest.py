"""A start-up check that a kernel set is row-invariant on this machine, at a model's own sizes.

The compiled kernels are so by construction; the torch set relies on a library's choices, so the
engine runs this before it serves with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .api import AttentionRows, KernelSet, KVBuffers, LayerWeights, StackShape, Weight

NUM_ROWS = 23
ROW_COUNTS = (1, 2, 7, 8, 9, NUM_ROWS)
PAGE_SIZE = 16


def self_test_row_invariance(kernels: KernelSet, shape: StackShape, vocab_size: int) -> None:
    """Run rows of one sequence alone and in shuffled batches and compare the bits.

    One random layer and head of the given sizes are built for it.

    Args:
        shape: as the model's, with rope tables of at least 23 positions.
        vocab_size: rows of the head.

    Raises:
        RuntimeError: a row's result depends on its batch.
    """
    generator = torch.Generator().manual_seed(0)
    probe = _Probe(kernels, shape, vocab_size, generator)
    alone = [probe.logits(torch.tensor([row])) for row in range(NUM_ROWS)]
    for count in ROW_COUNTS:
        rows = torch.randperm(NUM_ROWS, generator=generator)[:count].sort().values
        together = probe.logits(rows)
        for at, row in enumerate(rows.tolist()):
            if not torch.equal(together[at], alone[row][0]):
                raise RuntimeError(
                    f"the {kernels.name!r} kernels are not row-invariant on this machine: row "
                    f"{row} alone and in a batch of {count} differ by "
                    f"{(together[at] - alone[row][0]).abs().max():.2e}"
                )


class _Probe:
    """One random layer, a head and a pool; row i of the sequence sits at position i."""

    def __init__(
        self, kernels: KernelSet, shape: StackShape, vocab_size: int, generator: torch.Generator
    ) -> None:
        self._generator = generator
        self._stack = kernels.decoder_stack([self._layer(shape)], shape)
        self._head = kernels.linear(self._weight(vocab_size, shape.hidden_size))
        self._x = torch.randn(NUM_ROWS, shape.hidden_size, generator=generator)
        num_pages = -(-NUM_ROWS // PAGE_SIZE)
        heads, dim = shape.num_kv_heads, shape.head_dim
        self._kv = KVBuffers(
            torch.zeros(1, num_pages, PAGE_SIZE // 16, heads, dim, 16),
            torch.zeros(1, num_pages, PAGE_SIZE // 16, heads, 16, dim),
        )
        self._page_table = torch.arange(num_pages, dtype=torch.int32).unsqueeze(0)

    def logits(self, rows: Tensor) -> Tensor:
        """[len(rows), vocab] of the rows, whose predecessors have been run before."""
        at = AttentionRows(
            positions=rows.int(),
            row_to_req=torch.zeros(len(rows), dtype=torch.int32),
            out_slots=rows.clone(),
            page_table=self._page_table,
            kv_lens=rows.int() + 1,
        )
        hidden, _ = self._stack.forward(self._x[rows], at, self._kv)
        return self._head(hidden)

    def _weight(self, n: int, k: int) -> Weight:
        values = torch.randn(n, k, generator=self._generator) * k**-0.5
        return Weight(values.bfloat16(), "BF16", (n, k))

    def _layer(self, shape: StackShape) -> LayerWeights:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        return LayerWeights(
            input_norm=torch.ones(hidden),
            qkv=(
                self._weight(q_size, hidden),
                self._weight(kv_size, hidden),
                self._weight(kv_size, hidden),
            ),
            qkv_bias=torch.randn(q_size + 2 * kv_size, generator=self._generator),
            q_norm=torch.ones(shape.head_dim),
            k_norm=torch.ones(shape.head_dim),
            o=self._weight(hidden, q_size),
            o_bias=None,
            post_norm=torch.ones(hidden),
            gate=self._weight(inner, hidden),
            up=self._weight(inner, hidden),
            down=self._weight(hidden, inner),
        )
