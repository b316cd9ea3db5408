"""Environment variables, typed. Nothing else reads `os.environ`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

CpuKernels = Literal["auto", "numba", "torch"]


def cpu_kernels() -> CpuKernels:
    """`TRUESPEC_CPU_KERNELS`: "auto" takes numba where it can be imported, else torch."""
    value = os.environ.get("TRUESPEC_CPU_KERNELS", "auto")
    if value not in ("auto", "numba", "torch"):
        raise ValueError(f"TRUESPEC_CPU_KERNELS is {value!r}, expected auto, numba or torch")
    return value  # type: ignore[return-value]  # narrowed by the test above


def num_threads() -> int | None:
    """`TRUESPEC_NUM_THREADS`: compute threads; `None` takes one per usable core."""
    value = os.environ.get("TRUESPEC_NUM_THREADS")
    if value is None:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"TRUESPEC_NUM_THREADS is {value!r}, expected a whole number from 1")
    return int(value)


def cache_dir() -> Path:
    """`TRUESPEC_CACHE`: where compiled kernels and packed weights are kept."""
    value = os.environ.get("TRUESPEC_CACHE")
    if value:
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "truespec"
