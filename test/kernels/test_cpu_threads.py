"""The compute threads: idle when idle, safe to fork, out of the way when cores are taken."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from cpu_cases import kernels, make_weight, normal

from truespec.env import cache_dir
from truespec.kernels.cpu import CpuKernels
from truespec.kernels.cpu.threads import JUDGED_JOBS, TOO_SHORT, Contention

N, K = 2048, 1024


def make_linear(k: CpuKernels):
    return k.linear(make_weight("F32", N, K)), normal(5, K)


def compute_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("truespec-compute")]


def test_idle_threads_use_no_cpu_time():
    linear, x = make_linear(kernels(3))
    linear(x)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02


def test_jobs_come_back_whether_the_threads_still_wait_or_already_sleep():
    k = CpuKernels(cache_dir(), num_threads=3)
    linear, x = make_linear(k)
    expected = linear(x)
    for pause in range(0, 1000, 10):  # microseconds; threads fall asleep after about a hundred
        time.sleep(pause * 1e-6)
        assert torch.equal(linear(x), expected)
    k.close()


def test_close_ends_the_threads_and_a_later_call_starts_new_ones():
    before = len(compute_threads())
    k = CpuKernels(cache_dir(), num_threads=3)
    linear, x = make_linear(k)
    expected = linear(x)
    assert len(compute_threads()) == before + 2
    k.close()
    assert len(compute_threads()) == before
    assert torch.equal(linear(x), expected)
    k.close()


def test_dropping_a_kernel_set_ends_its_threads():
    before = len(compute_threads())
    linear, x = make_linear(CpuKernels(cache_dir(), num_threads=2))
    linear(x)
    assert len(compute_threads()) == before + 1
    del linear
    assert len(compute_threads()) == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own():
    linear, x = make_linear(kernels(2))
    expected = linear(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x), expected) else 3)
    deadline = time.monotonic() + 20
    pid, status = 0, 0
    while pid == 0 and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if pid == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert pid == child, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(linear(x), expected)


def test_flush_to_zero_of_one_thread_does_not_change_bits():
    linear, x = make_linear(kernels(2))
    x = x * 1e-38  # products and sums around the smallest normal number
    expected = linear(x)
    assert (expected.abs() < 2.0**-126).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert torch.equal(linear(x), expected)
    finally:
        torch.set_flush_denormal(False)


def test_more_threads_take_part_after_set_num_threads():
    k = CpuKernels(cache_dir(), num_threads=1)
    linear, x = make_linear(k)
    one, before = linear(x), len(compute_threads())
    k.set_num_threads(2)
    assert torch.equal(linear(x), one)
    assert len(compute_threads()) == before + 1
    k.close()
    with pytest.raises(ValueError, match="num_threads is 0"):
        k.set_num_threads(0)


def test_contention_drops_to_one_thread_and_tries_again(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    contention = Contention()
    for _ in range(5 * JUDGED_JOBS):
        contention.note(1.2, 2)
    assert contention.allows_threads()
    note_jobs(contention, 2.5)
    assert not contention.allows_threads()
    first_hold = contention.hold_until - now
    now = contention.hold_until
    assert contention.allows_threads()
    note_jobs(contention, 2.5)
    assert contention.hold_until - now == 2 * first_hold
    now = contention.hold_until
    note_jobs(contention, 1.0)
    assert contention.allows_threads()
    note_jobs(contention, 2.5)
    assert contention.hold_until - now == first_hold


def test_single_slow_jobs_and_short_ones_do_not_drop_threads():
    contention = Contention()
    for _ in range(10 * JUDGED_JOBS):
        contention.note(3.0, 2)
        contention.note(1.0, 2)
        contention.note(1.0, 2)
        contention.note(TOO_SHORT, 2)
    assert contention.allows_threads()


def note_jobs(contention: Contention, slowdown: float) -> None:
    for _ in range(JUDGED_JOBS):
        contention.note(slowdown, 2)
