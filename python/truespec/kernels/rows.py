"""How a [n, V] tensor of logits is handed to row kernels: dispatch, flat views, threads.

Knows layouts only, nothing of what the kernels compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truespec import env

_THREADED_ELEMENTS = 2**22  # below, handing rows to threads costs more than it saves


@lru_cache(maxsize=8)
def use_numba(device: torch.device) -> bool:
    """Whether row kernels on `device` run in numba (`TRUESPEC_CPU_KERNELS`), else in torch."""
    return device.type == "cpu" and env.cpu_kernels() != "torch" and has_numba()


@lru_cache(maxsize=1)
def has_numba() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def is_direct(logits: Tensor) -> bool:
    """Whether kernels can read a tensor as it is: fp32 with adjacent columns."""
    return logits.dtype == torch.float32 and logits.stride(-1) == 1


def flat_fp32(logits: Tensor) -> tuple[NDArray[np.float32], int]:
    """A 1-D contiguous fp32 view that covers all rows, and the distance between rows.

    What kernels can read is not copied, whatever the row stride (0 for an expanded view). Other
    tensors are widened: pass few rows at a time.
    """
    if not is_direct(logits):
        logits = logits.to(torch.float32).contiguous()
    num_rows, num_columns = logits.shape
    if logits.is_contiguous():
        return logits.numpy().reshape(-1), num_columns
    stride = logits.stride(0)
    return logits.as_strided(((num_rows - 1) * stride + num_columns,), (1,)).numpy(), stride


def flat_blocks(logits: Tensor, rows: int) -> Iterator[tuple[int, int, NDArray[np.float32], int]]:
    """(begin, end, flat view, stride) of blocks of rows: of all at once if they need no copy.

    Args:
        rows: at most so many are widened at a time.
    """
    num_rows = logits.shape[0]
    step = max(1, num_rows if is_direct(logits) else rows)
    for begin in range(0, num_rows, step):
        end = min(num_rows, begin + step)
        block = logits if end - begin == num_rows else logits[begin:end]
        yield begin, end, *flat_fp32(block)


def run_row_ranges(
    f: Callable[..., None], begin: int, end: int, num_columns: int, args: tuple[object, ...]
) -> None:
    """Call f(begin, end, *args), on several threads by turns when that pays. f releases the GIL.

    A row's result does not depend on its range, so the split changes no bit.
    """
    num_rows = end - begin
    if num_rows * num_columns < _THREADED_ELEMENTS or num_rows < 2:
        f(begin, end, *args)
        return
    pool, num_threads = _pool()
    step = -(-num_rows // num_threads)
    starts = range(begin, end, step)
    for done in [pool.submit(f, s, min(end, s + step), *args) for s in starts]:
        done.result()


@lru_cache(maxsize=1)
def _pool() -> tuple[ThreadPoolExecutor, int]:
    num_threads = env.num_threads() or len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(num_threads, thread_name_prefix="rows"), num_threads
