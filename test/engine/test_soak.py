"""A long run of random traffic: nothing is lost, and memory stays flat."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from speculative.harness import Engine, engine_config, kernels, make_engine, make_prompts
from truespec.message import Abort, Submit
from truespec.params import LogprobParams, SamplingParams

PAGE_BYTES = 4096
ALLOWED_GROWTH = 24 << 20  # allocator noise; a leak of one row per step would be far above


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def drive(engine: Engine, num_steps: int, rng: random.Random) -> tuple[int, int]:
    """Random submits, aborts and thread counts; (finished, aborted) requests."""
    scheduler = engine.scheduler
    prompts = make_prompts(24, seed=3)
    running: set[str] = set()
    finished = aborted = 0
    for step in range(num_steps):
        if len(running) < 12 and rng.random() < 0.3:
            name = f"soak-{step}"
            params = SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                seed=step,
                max_tokens=rng.randint(1, 40),
                frequency_penalty=rng.choice((0.0, 0.5)),
                logprobs=rng.choice((None, LogprobParams(top_k=rng.randint(0, 5)))),
            )
            scheduler.submit(Submit(name, list(rng.choice(prompts)), params))
            running.add(name)
        if running and rng.random() < 0.03:
            name = rng.choice(sorted(running))
            aborted += scheduler.abort(Abort(name, "the client left")) is not None
            running.discard(name)
        if rng.random() < 0.01:
            kernels().set_num_threads(rng.randint(1, 2))
        for output in scheduler.step():
            if output.finish is not None:
                assert output.finish.kind in ("stop", "length"), output.finish
                running.discard(output.rid)
                finished += 1
    for name in running:
        scheduler.abort(Abort(name, "the end"))
    scheduler.check_idle()
    return finished, aborted


@pytest.mark.parametrize(
    "num_steps", [500, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.slow])]
)
def test_random_traffic_with_aborts_and_thread_changes_leaves_memory_flat(num_steps):
    if not hasattr(kernels(), "set_num_threads"):
        pytest.skip("the torch kernels have no thread pool of their own")
    engine = make_engine("llama", engine_config("NGRAM", pool=208, chunk=32, adaptive=False))
    rng = random.Random(11)
    drive(engine, 200, rng)
    before = resident_bytes()
    finished, aborted = drive(engine, num_steps, rng)
    growth = resident_bytes() - before
    kernels().set_num_threads(1)
    assert growth < ALLOWED_GROWTH, f"{growth >> 20} MiB more after {num_steps} steps"
    assert finished > num_steps // 50
    assert aborted > 2
    assert engine.num_retractions > 0
