"""Compute threads: one hand-over per job, results that do not depend on how many take part.

A job is a compiled function `f(thread, num_threads, record)`. Idle threads sleep. Knows nothing of
what the functions compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

# fmt: off
RUN_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)
# fmt: on
Run = Callable[[int, int, int, int], int]
MIN_SECONDS_TO_JUDGE = 5e-4  # shorter jobs say nothing about contention
TOO_SHORT = 0.0
JUDGED_JOBS = 8
EFFICIENCY = 0.9  # of several threads, against one thread each
HOLD_SECONDS = (0.2, 4.0)  # how long to stay on one thread: first time, at most


class ThreadPool:
    """Runs jobs on up to `num_threads` threads, the calling one included.

    Safe to use from one thread at a time. After a fork the child starts threads of its own.
    """

    def __init__(self, run_address: int, num_threads: int) -> None:
        """Prepare; threads start with the first job.

        Args:
            run_address: the compiled `run` (sync_ir.py).
            num_threads: threads at most.
        """
        self._run = RUN_TYPE(run_address)
        self.num_threads = num_threads
        self._barrier = (ctypes.c_int64 * 16)()
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        self._contention = Contention()
        weakref.finalize(self, _stop, self._workers)

    @property
    def barrier_address(self) -> int:
        """Address of the counter that barriers of a job count in."""
        return ctypes.addressof(self._barrier)

    def set_num_threads(self, num_threads: int) -> None:
        """Use this many threads from the next job on."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, at least 1 is needed")
        self.num_threads = num_threads
        self._contention = Contention()

    def run(self, function: int, record: int, useful_threads: int) -> None:
        """Run a job to its end.

        Args:
            function: address of the job's compiled function.
            record: address of its arguments.
            useful_threads: more than that would not make it faster.
        """
        num = min(self.num_threads, useful_threads)
        if num > 1 and not self._contention.allows_threads():
            num = 1
        if num == 1:
            self._run(function, 0, 1, record)
            return
        workers = self._ready_workers(num - 1)
        self._barrier[0] = 0
        job = _Job(function, num, record)
        for worker in workers:
            worker.start_job(job)
        slowdowns = [_timed_run(self._run, job, 0), *(worker.wait() for worker in workers)]
        self._contention.note(max(slowdowns), num)

    def close(self) -> None:
        """Stop the threads; the next job would start new ones."""
        _stop(self._workers)

    def _ready_workers(self, count: int) -> list[_Worker]:
        """`count` workers of this process."""
        if self._owner != os.getpid():  # threads do not survive a fork
            self._owner = os.getpid()
            self._workers.clear()
        while len(self._workers) < count:
            self._workers.append(_Worker(self._run, len(self._workers) + 1))
        return self._workers[:count]


@dataclass(slots=True)
class Contention:
    """Decides when other processes hold so many cores that one thread is faster than several.

    With barriers a step is as slow as its slowest thread: a thread that waits for a core makes
    all wait. How much that is shows in elapsed against CPU time, without a reference speed.
    """

    slowdowns: list[float] = field(default_factory=list)
    hold_until: float = 0.0
    hold: float = HOLD_SECONDS[0]

    def allows_threads(self) -> bool:
        """Whether the next job may use several threads."""
        return self.hold_until == 0.0 or time.monotonic() >= self.hold_until

    def note(self, slowdown: float, num_threads: int) -> None:
        """Judge by the last jobs.

        Args:
            slowdown: elapsed by CPU time of the thread that waited most, or `TOO_SHORT`.
            num_threads: threads of the job.
        """
        if slowdown == TOO_SHORT:
            return
        self.slowdowns.append(slowdown)
        if len(self.slowdowns) < JUDGED_JOBS:
            return
        mean = sum(self.slowdowns) / len(self.slowdowns)
        self.slowdowns.clear()
        if mean > EFFICIENCY * num_threads:
            self.hold_until = time.monotonic() + self.hold
            self.hold = min(2 * self.hold, HOLD_SECONDS[1])
        else:
            self.hold_until, self.hold = 0.0, HOLD_SECONDS[0]


@dataclass(frozen=True, slots=True)
class _Job:
    """What all threads run."""

    function: int
    num_threads: int
    record: int


class _Worker:
    """A thread that sleeps between jobs."""

    def __init__(self, run: Run, index: int) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._job: _Job | None = None
        self._slowdown = TOO_SHORT
        loop = threading.Thread(
            target=self._loop, args=(run, index), name=f"truespec-compute-{index}", daemon=True
        )
        self._thread = loop
        loop.start()

    def start_job(self, job: _Job) -> None:
        """Hand over; `wait` must follow."""
        self._job = job
        self._go.release()

    def wait(self) -> float:
        """Wait for the end of the job; the thread's slowdown."""
        self._done.acquire()
        return self._slowdown

    def stop(self) -> None:
        """End the thread."""
        self._job = None
        with contextlib.suppress(RuntimeError):
            self._go.release()
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join(timeout=1.0)

    def _loop(self, run: Run, index: int) -> None:
        """Body of the thread."""
        while True:
            self._go.acquire()
            job = self._job
            if job is None:
                return
            self._slowdown = _timed_run(run, job, index)
            self._done.release()


def _timed_run(run: Run, job: _Job, thread: int) -> float:
    """Run a thread's part of a job; its elapsed by its CPU time, or `TOO_SHORT`."""
    wall, cpu = time.perf_counter(), time.thread_time()
    run(job.function, thread, job.num_threads, job.record)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    return TOO_SHORT if wall < MIN_SECONDS_TO_JUDGE else wall / max(cpu, 1e-6)


def _stop(workers: list[_Worker]) -> None:
    """End all threads."""
    while workers:
        workers.pop().stop()
