"""Speed of truespec, offline and over HTTP: tokens per second with and without logprobs.

Batch 1 and 8. Prints a table of medians of interleaved runs and writes them as JSON. Example:
    python benchmark/serve.py --algorithms NONE,DSPARK --out serve.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from servers import TruespecServer, http_json
from truespec import LLM, EngineConfig, LogprobParams, SamplingParams

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a virus and a bacterium?",
    "Give me three tips for learning to cook.",
    "Describe the water cycle in simple words.",
    "Write a Python function that reverses a list.",
    "What should I pack for a week in the mountains?",
    "Tell me about the history of the printing press.",
)
LOGPROBS = (None, 1, 20)
BATCHES = ((1, 128), (8, 96))  # (requests at once, new tokens each)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure: its name and a function that returns tokens per second."""

    name: str
    run: Callable[[], float]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--algorithms", default="NONE,DSPARK", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the figures")
    args = parser.parse_args()
    cases: list[Case] = []
    servers = []
    for algorithm in args.algorithms.split(","):
        llm = LLM(EngineConfig(model_path=args.model_path, speculative_algorithm=algorithm))
        server = TruespecServer(args.model_path, algorithm)
        servers.append(server)
        cases += offline_cases(algorithm, llm) + http_cases(algorithm, server.base)
    try:
        figures = interleaved(cases, args.rounds)
    finally:
        for server in servers:
            server.close()
    report(figures)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def interleaved(cases: list[Case], rounds: int) -> dict[str, list[float]]:
    """Every case once per round, after one round that warms up."""
    figures: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            value = case.run()
            if number:
                figures[case.name].append(round(value, 2))
    return figures


def report(figures: dict[str, list[float]]) -> None:
    """A table of medians."""
    width = max(map(len, figures))
    print(f"{'case':{width}}  median      min      max")
    for name, values in figures.items():
        middle = statistics.median(values)
        print(f"{name:{width}}  {middle:6.1f}  {min(values):7.1f}  {max(values):7.1f}")


def offline_cases(algorithm: str, llm: LLM) -> list[Case]:
    """Through `LLM`: generation, and prefill of long prompts (tokens per second of the prompt)."""
    ids = [llm.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]

    def generate(batch: int, count: int, top_k: int | None) -> float:
        wish = None if top_k is None else LogprobParams(top_k=top_k)
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=wish)
        start = time.perf_counter()
        done = llm.generate(ids[:batch], params)
        return sum(len(g.records) for g in done) / (time.perf_counter() - start)

    def prefill(length: int) -> float:
        prompt = [(7 * i + int(time.time() * 1000)) % 40000 + 20 for i in range(length)]
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        return length / (time.perf_counter() - start)

    cases = [
        Case(f"{algorithm} LLM batch {b} logprobs {k}", lambda b=b, n=n, k=k: generate(b, n, k))
        for b, n in BATCHES
        for k in LOGPROBS
    ]
    return [*cases, Case(f"{algorithm} LLM prefill 512", lambda: prefill(512))]


def http_cases(algorithm: str, base: str) -> list[Case]:
    """Through `/v1/chat/completions`, one connection per request."""

    def generate(batch: int, count: int, top_k: int | None) -> float:
        counts: list[int] = []

        def one(text: str) -> None:
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
            }
            if top_k is not None:
                body |= {"logprobs": True, "top_logprobs": top_k}
            counts.append(
                http_json(f"{base}/v1/chat/completions", body)["usage"]["completion_tokens"]
            )

        threads = [threading.Thread(target=one, args=(text,)) for text in PROMPTS[:batch]]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - start)

    return [
        Case(f"{algorithm} HTTP batch {b} logprobs {k}", lambda b=b, n=n, k=k: generate(b, n, k))
        for b, n in BATCHES
        for k in (None, 20)
    ]


if __name__ == "__main__":
    main()
