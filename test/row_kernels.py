"""Runs a block of a test on one kind of row kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from truespec.kernels.rows import use_numba


@contextmanager
def row_kernels(name: str) -> Iterator[None]:
    """`TRUESPEC_CPU_KERNELS` is `name` inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRUESPEC_CPU_KERNELS", name)
        use_numba.cache_clear()
        yield
    use_numba.cache_clear()
