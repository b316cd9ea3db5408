"""How much memory there is to plan with."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")


def free_bytes(device: str) -> int:
    """Memory that can still be taken on a device ("cpu" or "cuda"), in bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if MEMINFO.exists():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30  # a platform that does not say: plan for a small machine
