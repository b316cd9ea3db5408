"""How a [n, V] tensor of logits is handed to row kernels: dispatch, flat views, threads.

Knows layouts only, nothing of what the kernels compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from truespec import env

_THREADED_ELEMENTS = 2**22  # below, handing rows to threads costs more than it saves


def use_numba(device: torch.device) -> bool:
    """Whether row kernels on `device` run in numba (`TRUESPEC_CPU_KERNELS`), else in torch."""
    return device.type == "cpu" and env.cpu_kernels() != "torch" and has_numba()


@lru_cache(maxsize=1)
def has_numba() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def flat_fp32(logits: Tensor) -> tuple[Tensor, int]:
    """A 1-D contiguous fp32 view that covers all rows, and the distance between rows.

    fp32 logits with adjacent columns are not copied, whatever the row stride (0 for an expanded
    view). Other types are widened: pass few rows at a time.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        logits = logits.to(torch.float32).contiguous()
    num_rows, num_columns = logits.shape
    stride = logits.stride(0) if num_rows > 1 else num_columns
    span = max(0, (num_rows - 1) * stride + num_columns) if num_rows else 0
    return logits.as_strided((span,), (1,)), stride


def row_blocks(logits: Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `rows` rows; one range when no copy is needed to read them as fp32."""
    num_rows = logits.shape[0]
    if logits.dtype == torch.float32 and logits.stride(-1) == 1:
        rows = max(1, num_rows)
    for begin in range(0, num_rows, rows):
        yield begin, min(num_rows, begin + rows)


def run_row_ranges(f: Callable[[int, int], None], num_rows: int, num_columns: int) -> None:
    """Call f(begin, end) over all rows, on several threads when that pays. f releases the GIL.

    A row's result does not depend on its range, so the split changes no bit.
    """
    if num_rows * num_columns < _THREADED_ELEMENTS or num_rows < 2:
        f(0, num_rows)
        return
    pool, num_threads = _pool()
    step = -(-num_rows // num_threads)
    starts = range(0, num_rows, step)
    for done in [pool.submit(f, s, min(num_rows, s + step)) for s in starts]:
        done.result()


@lru_cache(maxsize=1)
def _pool() -> tuple[ThreadPoolExecutor, int]:
    num_threads = env.num_threads() or len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(num_threads, thread_name_prefix="rows"), num_threads
