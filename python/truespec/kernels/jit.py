"""How row kernels are compiled: numba without fastmath, kept on disk by the source they came from.

Knows numba's options and nothing of the kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba

from truespec import env

Function = Callable[..., Any]  # numba finds the types of a kernel at its first call


def kernel(function: Function) -> Function:
    """Compile on first call; releases the GIL. IEEE arithmetic in the order written."""
    return _compile(function, forceinline=False)


def inline_kernel(function: Function) -> Function:
    """The same for a small function that must vanish in its caller's loop, so that LLVM sees it."""
    return _compile(function, forceinline=True)


def _compile(function: Function, *, forceinline: bool) -> Function:
    # NOTE: numba's cache watches a function's own file only, not what it calls; hence a directory
    # per state of this package's source.
    configured = numba.config.CACHE_DIR  # type: ignore[attr-defined]  # made at import
    numba.config.CACHE_DIR = str(_cache_dir())  # type: ignore[attr-defined]  # as above
    try:
        compiled: Function = numba.njit(cache=True, nogil=True, forceinline=forceinline)(function)
    finally:
        numba.config.CACHE_DIR = configured  # type: ignore[attr-defined]  # as above
    return compiled


@lru_cache(maxsize=1)
def _cache_dir() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    directory = env.cache_dir() / f"rows-{digest.hexdigest()[:24]}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory
