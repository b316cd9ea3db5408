"""Kernels: arithmetic on one device. Imports nothing of ours outside this room."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from .api import KernelSet
from .reference import ReferenceKernels


def kernel_set(
    choice: str,
    device: str,
    *,
    cache_dir: Path,
    num_threads: int | None = None,
    progress: Callable[[str], None] | None = None,
    lossy_int8_activations: bool = False,
) -> KernelSet:
    """The kernels for a device.

    Args:
        choice: "numba", "torch", or "auto" for numba where it runs, else torch. It concerns a CPU;
            other devices run the torch set.
        device: "cpu" or a CUDA device.
        cache_dir: where compiled code is kept.
        num_threads: compute threads on a CPU; `None` takes one per usable core.
        progress: told what is being compiled the first time.
        lossy_int8_activations: see `CpuKernels`.

    Raises:
        ImportError, RuntimeError: "numba" was chosen and cannot be imported or lacks CPU features.
        ValueError: the choice is unknown, or kernels without 8-bit activations were asked for some.
    """
    if choice not in ("auto", "numba", "torch"):
        raise ValueError(f"kernel choice is {choice!r}, expected auto, numba or torch")
    if device == "cpu" and choice != "torch":
        try:
            from .cpu import CpuKernels

            return CpuKernels(
                cache_dir,
                num_threads=num_threads,
                progress=progress,
                lossy_int8_activations=lossy_int8_activations,
            )
        except (ImportError, RuntimeError) as error:
            if choice == "numba":
                raise
            warnings.warn(f"the compiled kernels are not available ({error}): torch", stacklevel=2)
    if lossy_int8_activations:
        raise ValueError("--lossy-int8-activations: only the compiled CPU kernels have them")
    if device == "cpu" and num_threads is not None:
        torch.set_num_threads(num_threads)
    return ReferenceKernels(device)
