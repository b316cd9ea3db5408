"""Kernels: arithmetic on one device. Imports nothing of ours outside this room."""

from __future__ import annotations

import warnings

from .api import KernelSet
from .reference import ReferenceKernels


def kernel_set(choice: str, device: str = "cpu") -> KernelSet:
    """The kernels for a device.

    Args:
        choice: "numba", "torch", or "auto" for numba where it can be imported, else torch. It
            concerns a CPU; other devices run the torch set.
        device: "cpu" or a CUDA device.

    Raises:
        ImportError: "numba" was chosen and cannot be imported.
        ValueError: the choice is unknown.
    """
    if choice not in ("auto", "numba", "torch"):
        raise ValueError(f"kernel choice is {choice!r}, expected auto, numba or torch")
    if device != "cpu" or choice == "torch":
        return ReferenceKernels(device)
    try:
        from .cpu import CpuKernels
    except ImportError as error:
        if choice == "numba":
            raise
        warnings.warn(f"the compiled kernels are not available ({error}): torch", stacklevel=2)
        return ReferenceKernels(device)
    return CpuKernels()
