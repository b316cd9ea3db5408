"""Compiled code stays inside its arrays, keeps what it points at alive, and does not grow."""

from __future__ import annotations

import gc
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from cpu_cases import Model, causal_rows, kernels, normal, page_table

from truespec.kernels.cpu import CpuKernels
from truespec.kernels.cpu.compile import Compiler, host_cpu
from truespec.kernels.cpu.sync_ir import SYNC_FUNCTIONS, sync_module

GUARDED = Path(__file__).with_name("cpu_guarded.py")
WIDE = Model(576, 9, 3, 64, 640, 2, "Q4_1")


def run_guarded(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GUARDED), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_no_kernel_reads_or_writes_outside_its_arrays():
    done = run_guarded()
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


def test_the_guard_pages_end_a_process_that_overruns():
    assert run_guarded("--overrun").returncode == -signal.SIGSEGV


def test_other_native_libraries_run_between_steps_and_bits_stay_the_same():
    stack = kernels(2).decoder_stack(WIDE.weights(), WIDE.shape())
    table, pool, x = page_table(1, 4), WIDE.pool(4), normal(40, WIDE.hidden)
    rows = causal_rows(table, [(0, 0, 40)], 16)
    expected, _ = stack.forward(x, rows, pool)
    square = normal(200, 200)
    for step in range(60):
        y, _ = stack.forward(x, rows, pool)
        assert torch.equal(y, expected)
        product = square @ square  # oneDNN or BLAS of torch
        solved = np.linalg.solve(product.numpy() + 200 * np.eye(200), square.numpy())  # LAPACK
        assert np.isfinite(solved).all()
        torch.sort(product, dim=1)
        if step % 20 == 0:
            gc.collect()


def test_a_stack_outlives_the_names_of_its_weights():
    stack = kernels().decoder_stack(WIDE.weights(), WIDE.shape())
    table, x = page_table(1, 1), normal(3, WIDE.hidden)
    rows = causal_rows(table, [(0, 0, 3)], 16)
    expected, _ = stack.forward(x, rows, WIDE.pool(1))
    gc.collect()
    filler = [torch.full((1 << 16,), 7.0) for _ in range(200)]
    y, _ = stack.forward(x, rows, WIDE.pool(1))
    assert torch.equal(y, expected)
    assert len(filler) == 200


def test_memory_is_flat_over_many_steps():
    stack = kernels().decoder_stack(WIDE.weights(), WIDE.shape())
    table, pool = page_table(1, 4), WIDE.pool(4)

    def run_steps(count: int) -> None:
        for i in range(count):
            m = 1 + i % 9
            rows = causal_rows(table, [(0, i % 50, i % 50 + m)], 16)
            stack.forward(normal(m, WIDE.hidden), rows, pool, capture=(0,))

    run_steps(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_steps(400)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


def test_the_second_kernel_set_of_a_machine_compiles_nothing(tmp_path):
    first: list[str] = []
    second: list[str] = []
    for told in (first, second):
        k = CpuKernels(tmp_path, num_threads=1, progress=told.append)
        k.linear(WIDE.weights()[0].o)(normal(2, 576))
    assert any("linear_uint4" in text for text in first)
    assert any("forward" in text for text in first)
    assert second == []


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    told: list[str] = []
    compiler = Compiler(host_cpu(), blocked, told.append)
    assert compiler.load("sync", sync_module, list(SYNC_FUNCTIONS)).keys() == SYNC_FUNCTIONS.keys()
    assert told[0].startswith(f"cannot write {blocked}")
