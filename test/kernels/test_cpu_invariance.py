"""Bits of a row do not depend on chunks, pages, neighbours, siblings, threads or vector length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_cases import Model, causal_rows, in_chunks, kernels, normal, page_table, slots_of
from torch import Tensor

from truespec.kernels.api import AttentionRows
from truespec.kernels.cpu import CpuKernels
from truespec.kernels.cpu.compile import Cpu

SMALL = Model(96, 6, 2, 32, 160, 2, "Q8_0")
# Enough work per row that two threads take part.
WIDE = Model(576, 9, 3, 64, 640, 2, "Q4_1")
AVX2 = Cpu("x86-64-v3", "")


def run_alone(
    k: CpuKernels,
    model: Model,
    x: Tensor,
    chunks: list[int],
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Outputs of one sequence, run in chunks."""
    pages = -(-len(x) // page_size)
    table, pool = page_table(1, pages, seed=page_size), model.pool(pages, page_size, dtype)
    stack = k.decoder_stack(model.weights(), model.shape())
    outputs = []
    for start, end in in_chunks(len(x), chunks):
        rows = causal_rows(table, [(0, start, end)], page_size)
        outputs.append(stack.forward(x[start:end], rows, pool)[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_page_sizes_do_not_change_bits(dtype):
    x = normal(75, SMALL.hidden)
    expected = run_alone(kernels(), SMALL, x, [1], 16, dtype)
    for chunks, page_size in (([75], 16), ([2], 16), ([3, 5], 32), ([7], 64), ([32, 1, 9], 32)):
        assert torch.equal(run_alone(kernels(), SMALL, x, chunks, page_size, dtype), expected)


def test_every_number_of_rows_up_to_32_gives_equal_bits():
    x = normal(64, SMALL.hidden)
    expected = run_alone(kernels(), SMALL, x, [64])
    for rows in range(1, 33):
        assert torch.equal(run_alone(kernels(), SMALL, x, [rows]), expected), rows


def test_contexts_beyond_one_softmax_span_do_not_depend_on_chunks():
    model, x = replace(SMALL, layers=1), normal(1040, SMALL.hidden)
    expected = run_alone(kernels(), model, x, [1])
    assert torch.equal(run_alone(kernels(), model, x, [256]), expected)
    assert torch.equal(run_alone(kernels(), model, x, [500, 37], 64), expected)


def test_a_mixed_shuffled_batch_gives_every_request_its_own_bits():
    model, lengths = SMALL, [41, 3, 58, 17]
    stack = kernels().decoder_stack(model.weights(), model.shape())
    xs = [normal(n, model.hidden, seed=n) for n in lengths]
    alone = [run_alone(kernels(), model, x, [1]) for x in xs]
    table, pool = page_table(4, 4, seed=9), model.pool(16)
    done = [0, 0, 0, 0]
    generator = torch.Generator().manual_seed(0)
    outputs: list[list[Tensor]] = [[], [], [], []]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        parts = []
        for req in torch.randperm(4, generator=generator).tolist():
            count = int(torch.randint(1, 14, (1,), generator=generator))
            end = min(lengths[req], done[req] + count)
            if end > done[req]:
                parts.append((req, done[req], end))
                done[req] = end
        x = torch.cat([xs[req][start:end] for req, start, end in parts])
        y, _ = stack.forward(x, causal_rows(table, parts, 16), pool)
        for (req, start, end), rows in zip(
            parts, y.split([end - start for _, start, end in parts]), strict=True
        ):
            outputs[req].append(rows)
            assert torch.equal(rows, alone[req][start:end])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_bits(threads):
    x = normal(40, WIDE.hidden)
    expected = run_alone(kernels(1), WIDE, x, [40])
    assert torch.equal(run_alone(kernels(threads), WIDE, x, [40]), expected)
    assert torch.equal(run_alone(kernels(threads), WIDE, x, [1, 8, 3]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_avx2_and_avx512_code_give_equal_bits(dtype):
    model, x = replace(WIDE, type_name="BF16", layers=1), normal(560, WIDE.hidden)
    expected = run_alone(kernels(), model, x, [280], 16, dtype)
    assert torch.equal(run_alone(kernels(cpu=AVX2), model, x, [556, 1], 16, dtype), expected)


# ---- trees ------------------------------------------------------------------------------------


def tree_rows(table: Tensor, start: int, parents: list[int]) -> AttentionRows:
    """Rows of a draft tree on top of `start` cached positions; the root has parent -1.

    Row i is written to slot start + i; its tail is its path from the root.
    """
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    num, longest = len(parents), max(map(len, paths))
    slots = slots_of(table, torch.zeros(num, dtype=torch.long), start + torch.arange(num), 16)
    tails = torch.full((num, longest), -1)
    for row, path in enumerate(paths):
        tails[row, : len(path)] = slots[path]
    depth = torch.tensor([len(path) - 1 for path in paths])
    return AttentionRows(
        positions=(start + depth).int(),
        row_to_req=torch.zeros(num, dtype=torch.int32),
        out_slots=slots,
        page_table=table,
        kv_lens=(start + depth + 1).int(),
        tail_starts=torch.full((num,), start, dtype=torch.int32),
        tail_slots=tails,
    )


@pytest.mark.parametrize("start", [5, 16, 30, 510])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_path_of_a_tree_has_the_bits_of_its_chain(start, dtype):
    model = replace(SMALL, layers=2)
    parents = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 8, 0]
    pages = -(-start // 16) + 2
    table = page_table(1, pages)
    stack = kernels().decoder_stack(model.weights(), model.shape())
    prefix, x = normal(start, model.hidden), normal(len(parents), model.hidden, seed=1)
    pool = model.pool(pages, 16, dtype)
    stack.forward(prefix, causal_rows(table, [(0, 0, start)], 16), pool)
    y, _ = stack.forward(x, tree_rows(table, start, parents), pool)
    for row in range(len(parents)):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = torch.cat([prefix, x[path]])
        assert torch.equal(y[row], run_alone(kernels(), model, chain, [64], 16, dtype)[-1]), row
