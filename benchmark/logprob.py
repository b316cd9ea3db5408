"""Logprobs of emitted tokens: ours beside log_softmax + topk + gather in torch.

Prints time and peak extra memory of both on the same logits:
    python benchmark/logprob.py [--rows 64] [--vocab 151936] [--top-k 20] [--threads N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from truespec.layers.utils.logprob import compute_spec_v2_logprobs, logprob_spec
from truespec.params import LogprobParams

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def main() -> None:
    """Measure both and print one line each, then the ratio."""
    options = _options()
    if options.threads:
        os.environ["TRUESPEC_NUM_THREADS"] = str(options.threads)
        torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(options.rows, options.vocab, generator=generator) * 3
    tokens = logits.argmax(-1)
    ways: dict[str, Callable[[], object]] = {
        "truespec": lambda: ours(logits, tokens, options.top_k),
        "torch": lambda: in_torch(logits, tokens, options.top_k),
    }
    _check(logits, tokens, options.top_k)
    megabytes = logits.numel() * logits.element_size() / 2**20
    print(f"{options.rows} x {options.vocab} fp32 ({megabytes:.1f} MiB), top {options.top_k}")
    medians = {}
    for name, call in ways.items():
        times = _times(call, options.repeats)
        medians[name] = statistics.median(times)
        extra = _peak_extra_bytes(call) / 2**20
        print(
            f"{name:9s} median {medians[name] * 1e3:8.2f} ms  best {min(times) * 1e3:8.2f} ms  "
            f"{megabytes / 1024 / medians[name]:6.2f} GiB/s  "
            f"peak extra {extra:7.2f} MiB ({100 * extra / megabytes:.1f} % of the logits)"
        )
    print(f"torch / truespec: {medians['torch'] / medians['truespec']:.2f}")


def ours(logits: Tensor, tokens: Tensor, top_k: int) -> list[Tensor]:
    """One token per row, as plain decoding and prompt scoring ask; also rank and entropy."""
    num_rows = logits.shape[0]
    output = compute_spec_v2_logprobs(
        logits,
        tokens[:, None],
        torch.arange(num_rows)[:, None],
        torch.ones(num_rows, dtype=torch.int32),
        vocab_size=logits.shape[1],
        spec=logprob_spec([LogprobParams(top_k=top_k)] * num_rows),
        processed=None,
    )
    return [output.chosen[0, :, 0], output.top_ids[0, :, 0], output.top_values[0, :, 0]]


def in_torch(logits: Tensor, tokens: Tensor, top_k: int) -> list[Tensor]:
    """The usual way, through a table of logprobs."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(top_k, -1)
    return [logprobs.gather(-1, tokens[:, None])[:, 0], best.indices, best.values]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="of both; 0 leaves their defaults")
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def _check(logits: Tensor, tokens: Tensor, top_k: int) -> None:
    """Both must say the same, or their times say nothing. Also compiles and warms up."""
    chosen, ids, values = ours(logits, tokens, top_k)
    for one, two in zip((chosen, values), in_torch(logits, tokens, top_k)[::2], strict=True):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=0)
    assert torch.equal(ids.long(), logits.topk(top_k, -1).indices), "different alternatives"


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _peak_extra_bytes(call: Callable[[], object]) -> float:
    """Growth of the resident peak over a call; nan where Linux's /proc is missing."""
    if not CLEAR_REFS.exists():
        return float("nan")
    before = _status_bytes("VmRSS")
    CLEAR_REFS.write_text("5")  # the peak starts over
    call()
    return float(_status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {name}")


if __name__ == "__main__":
    main()
