"""Milliseconds per step of a model's forward pass and head on this machine's CPU, by rows.

    python benchmark/kernels.py                       # the packaged model
    python benchmark/kernels.py --model m.gguf --threads 1 --kv-cache-dtype bfloat16

Minimum and median over repeated steps; other load on the machine shows in their distance.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from truespec.batch import ForwardBatch
from truespec.env import cache_dir
from truespec.kernels import kernel_set
from truespec.kernels.api import KVBuffers
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model

PAGE_SIZE = 16
BUDGET_SECONDS = 0.5  # per line, at least 3 steps


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of step.

    Attributes:
        name: what the line is called.
        num_seqs, start, num_rows: every sequence runs positions start .. start + num_rows - 1.
        head_rows: rows the head is computed for.
    """

    name: str
    num_seqs: int
    start: int
    num_rows: int
    head_rows: int


class Times(NamedTuple):
    """Milliseconds of the body and the head of one step."""

    body: float
    head: float


def steps(context: int) -> list[Step]:
    """Decoding, verifying, batches and prefill chunks."""
    verify = [
        Step(f"1 sequence, {m} rows", 1, context, m, m) for m in (1, 2, 3, 4, 5, 6, 8, 16, 32)
    ]
    batch = [Step(f"{n} sequences, 1 row", n, context, 1, n) for n in (2, 4, 8, 16)]
    prefill = [Step(f"prefill {m} rows at 0", 1, 0, m, 1) for m in (128, 256, 512)]
    return [*verify, *batch, *prefill, Step("prefill 256 rows at 3840", 1, 3840, 256, 1)]


def make_pool(model: CausalLM, num_pages: int, dtype: torch.dtype) -> KVBuffers:
    """A zeroed pool."""
    head = (model.num_layers, num_pages, PAGE_SIZE // 16, model.shape.num_kv_heads)
    return KVBuffers(
        torch.zeros(*head, model.shape.head_dim, 16, dtype=dtype),
        torch.zeros(*head, 16, model.shape.head_dim, dtype=dtype),
    )


def make_batch(step: Step, vocab_size: int) -> ForwardBatch:
    """The rows of a step, every sequence on pages of its own."""
    pages = -(-(step.start + step.num_rows) // PAGE_SIZE)
    table = torch.arange(step.num_seqs * pages, dtype=torch.int32).view(step.num_seqs, pages)
    positions = torch.arange(step.start, step.start + step.num_rows).repeat(step.num_seqs)
    reqs = torch.arange(step.num_seqs).repeat_interleave(step.num_rows)
    slots = table[reqs, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    return ForwardBatch(
        token_ids=torch.randint(vocab_size, (len(positions),)),
        positions=positions.int(),
        row_to_req=reqs.int(),
        out_slots=slots,
        page_table=table,
        kv_lens=positions.int() + 1,
    )


def measure(model: CausalLM, step: Step, batch: ForwardBatch, pool: KVBuffers) -> list[Times]:
    """Repeated steps, after one to warm up: body and head by turns, as in an engine.

    Either alone might find its weights in a cache that the other empties.
    """
    times: list[Times] = []
    deadline = float("inf")
    while len(times) < 4 or (time.perf_counter() < deadline and len(times) < 200):
        start = time.perf_counter()
        hidden = model.forward(batch, pool).hidden[-step.head_rows :]
        middle = time.perf_counter()
        model.logits(hidden)
        times.append(Times((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3))
        deadline = min(deadline, time.perf_counter() + BUDGET_SECONDS)
    return times[1:]


def main() -> None:
    """Print one line per kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=300, help="cached tokens per sequence")
    parser.add_argument("--kv-cache-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--kernels", choices=["numba", "torch"], default="numba")
    args = parser.parse_args()
    kernels = kernel_set(
        args.kernels, "cpu", cache_dir=cache_dir(), num_threads=args.threads, progress=print
    )
    model = load_model(args.model, kernels)
    batches = [(step, make_batch(step, model.config.vocab_size)) for step in steps(args.context)]
    num_pages = max(batch.page_table.numel() for _, batch in batches)
    pool = make_pool(model, num_pages, getattr(torch, args.kv_cache_dtype))
    print(f"{'step':28} {'min ms':>8} {'median':>8} {'head min':>9} {'tokens/s':>9}")
    for step, batch in batches:
        times = measure(model, step, batch, pool)
        sums = [sum(t) for t in times]
        total, median, head = min(sums), statistics.median(sums), min(t.head for t in times)
        rate = step.num_seqs * step.num_rows / total * 1e3
        print(f"{step.name:28} {total:8.2f} {median:8.2f} {head:9.2f} {rate:9.0f}", flush=True)


if __name__ == "__main__":
    main()
