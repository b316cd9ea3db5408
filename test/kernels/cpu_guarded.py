"""Runs steps with every array between unreadable pages: any access outside one ends the process.

Run as a program by test_cpu_memory.py; prints "ok" at the end.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import fields, replace

import numpy as np
import torch
from cpu_cases import Model, causal_rows, make_weight, normal, page_table
from torch import Tensor

from truespec.env import cache_dir
from truespec.kernels.api import AttentionRows, ContextRows, KVBuffers, LayerWeights
from truespec.kernels.cpu import CpuKernels, buffers, linear, runtime, stack
from truespec.kernels.cpu.arena import Arena

PAGE = mmap.PAGESIZE
PROT_NONE = 0
KEPT: list[mmap.mmap] = []
LIBC = ctypes.CDLL(None, use_errno=True)


def guarded_bytes(num_bytes: int) -> Tensor:
    """[num_bytes] zeroed uint8 that end at an unreadable page; another lies before them."""
    inner = -(-num_bytes // PAGE) * PAGE
    region = mmap.mmap(-1, inner + 2 * PAGE)
    KEPT.append(region)
    whole = np.frombuffer(region, dtype=np.uint8)
    for offset in (0, PAGE + inner):
        address = ctypes.c_void_p(whole.ctypes.data + offset)
        assert LIBC.mprotect(address, ctypes.c_size_t(PAGE), PROT_NONE) == 0
    end = PAGE + inner
    return torch.from_numpy(whole[end - num_bytes : end])


def guarded(tensor: Tensor) -> Tensor:
    """A copy of a tensor between unreadable pages."""
    tensor = tensor.contiguous()
    memory = guarded_bytes(tensor.numel() * tensor.element_size())
    copy = memory.view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy


def guarded_zeros(*shape: int) -> Tensor:
    return guarded(torch.zeros(*shape))


def guarded_rows(rows: AttentionRows) -> AttentionRows:
    arrays = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return AttentionRows(**{n: None if a is None else guarded(a) for n, a in arrays.items()})


def guarded_pool(pool: KVBuffers) -> KVBuffers:
    return KVBuffers(guarded(pool.k), guarded(pool.v))


def guard_everything() -> None:
    """Weights, working buffers, scratch and outputs get guarded memory from here on."""
    Arena.allocate = lambda self, num_bytes: guarded_bytes(num_bytes)
    for module in (buffers, linear):
        module.aligned_zeros = guarded_zeros
    runtime.torch = GuardedTorch(torch)
    stack.torch = GuardedTorch(torch)
    linear.torch = GuardedTorch(torch)


class GuardedTorch:
    """torch, except that `empty` returns guarded memory."""

    def __init__(self, wrapped: object) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> object:
        return getattr(self._wrapped, name)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return guarded(torch.zeros(*shape, dtype=dtype))


def run(model: Model, dtype: torch.dtype, page_size: int, num_threads: int = 1) -> None:
    """Prefill, decode, tree rows and context injection of one model."""
    k = CpuKernels(cache_dir(), num_threads=num_threads)
    layers: list[LayerWeights] = model.weights()
    shape = model.shape()
    shape = replace(
        shape, rope_cos=guarded(shape.rope_cos[:80]), rope_sin=guarded(shape.rope_sin[:80])
    )
    table = page_table(1, -(-80 // page_size))
    pool = guarded_pool(model.pool(table.shape[1], page_size, dtype))
    ours = k.decoder_stack(layers, shape)
    for start, end in ((0, 37), (37, 38), (38, 46), (46, 79)):
        rows = guarded_rows(causal_rows(table, [(0, start, end)], page_size))
        ours.forward(guarded(normal(end - start, model.hidden)), rows, pool, capture=(0,))
    rows = causal_rows(table, [(0, 79, 80)], page_size)
    tail = {"tail_starts": torch.tensor([70], dtype=torch.int32)}
    tail["tail_slots"] = torch.cat([causal_rows(table, [(0, 70, 80)], page_size).out_slots])[None]
    ours.forward(guarded(normal(1, model.hidden)), guarded_rows(replace(rows, **tail)), pool)
    rows = guarded_rows(causal_rows(table, [(0, 5, 29)], page_size))
    projection = k.linear(make_weight("Q8_0", model.hidden, 96))
    features, norm = guarded(normal(24, 96)), guarded(normal(model.hidden))
    context = ContextRows(features, projection, norm, rows.positions, rows.out_slots)
    ours.write_context(context, pool)
    block = guarded_rows(causal_rows(table, [(0, 29, 33)], page_size))
    head = k.linear(make_weight("BF16" if model.hidden % 32 else "Q8_0", 70, model.hidden))
    x = guarded(normal(4, model.hidden))
    ours.forward_to_logits(x, block, pool, final_norm=norm, head=head, context=context)
    k.move_kv(pool, rows.out_slots[:9], rows.out_slots[9:18])


def run_linear(type_name: str, n: int, columns: int) -> None:
    """Products of few and of many rows."""
    k = CpuKernels(cache_dir(), num_threads=1)
    linear_call = k.linear(make_weight(type_name, n, columns), guarded(normal(n)))
    for m in (1, 8, 9, 40):
        linear_call(guarded(normal(m, columns)))


def main() -> None:
    guard_everything()
    if "--overrun" in sys.argv:
        end = guarded(torch.zeros(5))
        ctypes.memset(end.data_ptr() + end.numel() * 4, 1, 1)
    run(Model(64, 3, 1, 16, 96), torch.float32, 16)
    run(Model(130, 4, 2, 32, 70, biases=True, head_norms=True), torch.bfloat16, 32)
    run(Model(576, 9, 3, 64, 640, 1, "Q4_1"), torch.float32, 16)
    run(Model(576, 9, 3, 64, 640, 1, "Q4_1"), torch.float32, 16, num_threads=2)
    for type_name, n, columns in (("F16", 33, 19), ("BF16", 64, 27), ("Q8_0", 50, 96)):
        run_linear(type_name, n, columns)
    print("ok")


if __name__ == "__main__":
    main()
