"""Memory of packed weights: few large regions on huge pages where the system has them."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

REGION_BYTES = 64 << 20
ALIGNMENT = 64


class Arena:
    """Hands out 64-byte aligned pieces of regions. A region lives as long as a piece of it."""

    def __init__(self) -> None:
        """Start without memory."""
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zeroed, aligned to 64 bytes."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > self._region.numel():
            self._region = _map_region(max(REGION_BYTES, num_bytes))
            start = 0
        self._used = start + num_bytes
        return self._region[start : self._used]


def _map_region(num_bytes: int) -> Tensor:
    """Fresh zeroed memory, on huge pages if the system allows.

    NOTE: huge pages are for private memory only; Python maps shared memory unless told.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(region, dtype=np.uint8))
