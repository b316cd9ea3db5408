"""The kernel sets that models are tested with."""

from __future__ import annotations

import pytest

from truespec import env
from truespec.kernels.api import KernelSet
from truespec.kernels.reference import ReferenceKernels


@pytest.fixture(scope="session")
def compiled_kernels() -> KernelSet:
    """The numba set, one for all tests; skips where it cannot run."""
    cpu = pytest.importorskip("truespec.kernels.cpu")
    try:
        return cpu.CpuKernels(env.cache_dir(), num_threads=1)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["torch", "numba"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Each kernel set in turn."""
    if request.param == "torch":
        return ReferenceKernels()
    return request.getfixturevalue("compiled_kernels")
