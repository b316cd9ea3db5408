"""The memory behind pages: K and V of every layer, target and draft, indexed by the same slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from truespec.kernels.api import KVBuffers

BLOCK = 16  # positions per key block of the attention kernels


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV of some layers that live in one pool.

    Attributes:
        num_layers: layers that share the shape.
        num_kv_heads, head_dim: shape of K and of V per position.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of one position over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVPool:
    """Pool buffers of the target (`target`) and of the drafter (`draft`, `None` without one).

    Memory is not touched before it is written, so unused pages cost no resident memory. Stale
    values are harmless: no kernel multiplies a slot beyond a row's length.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        target: LayerSpec,
        draft: LayerSpec | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def buffers(spec: LayerSpec) -> KVBuffers:
            lead = (spec.num_layers, num_pages, page_size // BLOCK, spec.num_kv_heads)
            return KVBuffers(
                k=torch.empty(*lead, spec.head_dim, BLOCK, dtype=dtype, device=device),
                v=torch.empty(*lead, BLOCK, spec.head_dim, dtype=dtype, device=device),
            )

        self.target = buffers(target)
        self.draft = buffers(draft) if draft is not None else None
