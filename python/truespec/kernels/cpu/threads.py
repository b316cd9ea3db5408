"""Compute threads: one hand-over per job, results that do not depend on how many take part.

A job is a compiled function `f(thread, num_threads, record)`. Between jobs threads wait for a
moment in compiled code, so that the jobs of a step follow each other without Python; then they
sleep. Knows nothing of what the functions compute.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import sync_ir as at

MIN_SECONDS_TO_JUDGE = 5e-4  # shorter jobs say nothing about contention
TOO_SHORT = 0.0
STOPPED = 1
LINE_WORDS = 8  # of a cache line: counters of different writers do not share one
JUDGED_EVERY = 7  # jobs: reading clocks takes time; not a number of jobs that a step may have
JUDGED_JOBS = 4
EFFICIENCY = 0.9  # of several threads, against one thread each
HOLD_SECONDS = (0.2, 4.0)  # how long to stay on one thread: first time, at most


class ThreadPool:
    """Runs jobs on up to `num_threads` threads, the calling one included.

    Safe to use from one thread at a time. After a fork the child starts threads of its own.
    """

    def __init__(
        self, functions: Mapping[str, int], code: object, give_way: int, num_threads: int
    ) -> None:
        """Prepare; threads start with the first job.

        Args:
            functions: addresses of the compiled functions of sync_ir.py.
            code: what keeps their code in memory; a thread holds on to it until it has ended.
            give_way: address of the C library's sched_yield.
            num_threads: threads at most.
        """
        self._calls = _Calls(functions, code)
        self._give_way = give_way
        self.num_threads = num_threads
        self._counters = (ctypes.c_int64 * (2 * LINE_WORDS))()
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        self._contention = Contention()
        self._num_jobs = 0
        weakref.finalize(self, _stop, self._workers)

    @property
    def barrier_address(self) -> int:
        """Address of the counter that barriers of a job count in."""
        return ctypes.addressof(self._counters)

    def set_num_threads(self, num_threads: int) -> None:
        """Use this many threads from the next job on."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, at least 1 is needed")
        self.num_threads = num_threads
        self._contention = Contention()

    def run(self, function: int, record: int, useful_threads: int) -> int:
        """Run a job to its end; returns what its function returns on this thread.

        Args:
            function: address of the job's compiled function.
            record: address of its arguments.
            useful_threads: more than that would not make it faster.
        """
        num = min(self.num_threads, useful_threads)
        if num > 1 and not self._contention.allows_threads():
            num = 1
        if num == 1:
            return self._calls.run(function, 0, 1, record)
        workers = self._ready_workers(num - 1)
        self._counters[0] = self._counters[LINE_WORDS] = 0
        for worker in workers:
            worker.start_job(function, num, record)
        self._num_jobs += 1
        if self._num_jobs % JUDGED_EVERY:
            result = self._calls.run(function, 0, num, record)
            self._calls.wait_for(self._done_address, num - 1, self._give_way)
            return result
        wall, cpu = time.perf_counter(), time.thread_time()
        result = self._calls.run(function, 0, num, record)
        own = _slowdown(time.perf_counter() - wall, time.thread_time() - cpu)
        self._calls.wait_for(self._done_address, num - 1, self._give_way)
        self._contention.note(max(own, *(worker.slowdown() for worker in workers)), num)
        return result

    def close(self) -> None:
        """Stop the threads; the next job would start new ones."""
        _stop(self._workers)

    @property
    def _done_address(self) -> int:
        """Address of the counter of workers that have done their part."""
        return self.barrier_address + 8 * LINE_WORDS

    def _ready_workers(self, count: int) -> list[_Worker]:
        """`count` workers of this process."""
        if self._owner != os.getpid():  # threads do not survive a fork
            self._owner = os.getpid()
            self._workers.clear()
        while len(self._workers) < count:
            index = len(self._workers) + 1
            self._workers.append(_Worker(self._calls, self._done_address, self._counters, index))
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


class _Calls:
    """The compiled functions that Python calls."""

    def __init__(self, functions: Mapping[str, int], code: object) -> None:
        self._code = code
        self.run = callable_of(functions["run"], 4)
        self.wait_for = callable_of(functions["wait_for"], 3)
        self.post = callable_of(functions["post"], 1)
        self.serve = callable_of(functions["serve"], 7)


class _Worker:
    """A thread that serves a mailbox."""

    def __init__(
        self, calls: _Calls, done: int, kept: ctypes.Array[ctypes.c_int64], index: int
    ) -> None:
        self._calls = calls
        self._mailbox = (ctypes.c_int64 * at.MAILBOX_WORDS)()
        self._wake = threading.Lock()
        self._wake.acquire()
        served = (self._mailbox, self._wake, calls, done, kept)
        self._thread = threading.Thread(
            target=_serve, args=(*served, index), name=f"truespec-compute-{index}", daemon=True
        )
        self._thread.start()

    def start_job(self, function: int, num_threads: int, record: int) -> None:
        """Hand over a job; the next one may follow when it is done."""
        box = self._mailbox
        box[at.FUNCTION], box[at.NUM_THREADS], box[at.RECORD] = function, num_threads, record
        if self._calls.post(ctypes.addressof(box)):
            self._wake.release()

    def slowdown(self) -> float:
        """Of the last job, which is done."""
        clocks = self._mailbox[at.CLOCKS : at.CLOCKS + 8]
        start, start_cpu, end, end_cpu = (
            seconds + nanoseconds * 1e-9
            for seconds, nanoseconds in zip(clocks[::2], clocks[1::2], strict=True)
        )
        return _slowdown(end - start, end_cpu - start_cpu)

    def stop(self) -> None:
        """End the thread."""
        self.start_job(0, 0, 0)
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join(timeout=1.0)


def _serve(
    mailbox: ctypes.Array[ctypes.c_int64],
    wake: threading.Lock,
    calls: _Calls,
    done: int,
    kept: ctypes.Array[ctypes.c_int64],
    index: int,
) -> None:
    """Body of a thread; `kept` is the memory `done` lies in."""
    clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
    clocks = time.CLOCK_MONOTONIC, time.CLOCK_THREAD_CPUTIME_ID
    while not calls.serve(ctypes.addressof(mailbox), index, done, clock, *clocks, STOPPED):
        wake.acquire()


def _slowdown(elapsed: float, cpu: float) -> float:
    """Elapsed by CPU seconds, or `TOO_SHORT`."""
    return TOO_SHORT if elapsed < MIN_SECONDS_TO_JUDGE else elapsed / max(cpu, 1e-6)


def callable_of(address: int, num_args: int) -> Callable[..., int]:
    """A compiled function of 64-bit integers, for Python; it runs without Python's lock."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_args)
    function: Callable[..., int] = kind(address)
    return function


def _stop(workers: list[_Worker]) -> None:
    """End all threads."""
    while workers:
        workers.pop().stop()
