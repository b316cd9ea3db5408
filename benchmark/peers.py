"""truespec beside other engines: same weights, prompts and token counts, interleaved in one run.

Takes whatever is installed. Example (bf16 directory made with `truespec convert`):
    python benchmark/peers.py --model-dir smollm2-bf16 --gguf smollm2-bf16.gguf \\
        --llama-server build/bin/llama-server --vllm-python env/bin/python --transformers
Measures tokens per second at batch 1 and 8, without logprobs and with 1 and 20, time to the first
token of a 512-token prompt, start, and resident memory. Prints medians and ratios, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from servers import Server, TruespecServer, http_json

TOKENS = {1: 128, 8: 96}  # batch size -> new tokens per request
LOGPROBS = (None, 1, 20)
PREFILL = 512


@dataclass(slots=True)
class Peer:
    """A running server and what its completion route wants.

    Attributes:
        name: in the table.
        server: the process.
        model: its name in requests.
        extra: fields that make it generate exactly the asked number of tokens.
    """

    name: str
    server: Server
    model: str
    extra: dict[str, object]

    def complete(self, prompt_ids: list[int], count: int, logprobs: int | None) -> int:
        """Greedy completion of token ids; the number of tokens it made."""
        body: dict[str, object] = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": count,
            "temperature": 0,
            **self.extra,
        }
        if logprobs is not None:
            body["logprobs"] = logprobs
        reply = http_json(f"{self.server.base}/v1/completions", body)
        return int(reply["usage"]["completion_tokens"])


def start_peers(args: argparse.Namespace) -> list[Peer]:
    """Every peer that was asked for, one after the other."""
    ignore = {"ignore_eos": True}
    peers = [
        Peer("truespec", TruespecServer(str(args.model_dir), "NONE"), str(args.model_dir), ignore),
        Peer(
            "truespec DSPARK",
            TruespecServer(str(args.model_dir), "DSPARK"),
            str(args.model_dir),
            ignore,
        ),
    ]
    if args.llama_server:
        command = [str(args.llama_server), "-m", str(args.gguf), "--port", "{port}"]
        command += ["-c", "16384", "-np", "8", "--no-webui"]
        peers.append(Peer("llama.cpp", Server(command, health="/health"), "m", ignore))
    if args.vllm_python:
        command = [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(args.model_dir), "--dtype", "bfloat16", "--port", "{port}"]
        command += ["--max-model-len", "2048", "--max-logprobs", "20"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        peers.append(
            Peer("vLLM", Server(command, health="/health", env=env), str(args.model_dir), ignore)
        )
    if args.transformers:
        script = Path(__file__).with_name("transformers_server.py")
        command = [sys.executable, str(script), str(args.model_dir), "{port}"]
        peers.append(Peer("transformers", Server(command, health="/health"), "m", {}))
    return peers


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids, so that no prefix cache helps anyone."""
    state = seed * 2654435761 % 2**31
    rows = []
    for _ in range(count):
        row = []
        for _ in range(length):
            state = (1103515245 * state + 12345) % 2**31
            row.append(100 + state % 40000)
        rows.append(row)
    return rows


def rate(peer: Peer, batch: int, logprobs: int | None, seed: int) -> float:
    """Tokens per second of `batch` requests at once."""
    counts: list[int] = []
    threads = [
        threading.Thread(
            target=lambda ids=ids: counts.append(peer.complete(ids, TOKENS[batch], logprobs))
        )
        for ids in prompts(batch, 24, seed)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def first_token_ms(peer: Peer, seed: int) -> float:
    """Milliseconds to the first token of a long prompt."""
    ids = prompts(1, PREFILL, seed)[0]
    start = time.perf_counter()
    peer.complete(ids, 1, None)
    return (time.perf_counter() - start) * 1000


def measure(peers: list[Peer], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Round by round, every peer after the other; the first round warms up."""
    figures: dict[str, dict[str, list[float]]] = {peer.name: {} for peer in peers}

    def note(peer: Peer, name: str, value: float, number: int) -> None:
        if number:
            figures[peer.name].setdefault(name, []).append(round(value, 2))

    for number in range(rounds + 1):
        for batch in TOKENS:
            for logprobs in LOGPROBS:
                for peer in peers:
                    seed = 1000 * number + batch
                    value = rate(peer, batch, logprobs, seed)
                    note(peer, f"tok/s batch {batch} logprobs {logprobs}", value, number)
        for peer in peers:
            note(peer, f"ms first token of {PREFILL}", first_token_ms(peer, number), number)
    for peer in peers:
        figures[peer.name]["s start"] = [round(peer.server.start_seconds, 2)]
        figures[peer.name]["MiB resident"] = [round(peer.server.resident_mib(), 1)]
    return figures


def report(figures: dict[str, dict[str, list[float]]]) -> None:
    """Medians, with the ratio to the first peer."""
    names = list(figures)
    print("| | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 1) + "|")
    for row in figures[names[0]]:
        medians = [statistics.median(figures[name][row]) for name in names]
        cells = [f"{value:.1f} ({value / medians[0]:.2f})" for value in medians]
        print(f"| {row} | " + " | ".join(cells) + " |")


def main() -> None:
    """Start, measure, report, stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model-dir", type=Path, required=True, help="Hugging Face directory, bf16"
    )
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server binary")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM")
    parser.add_argument("--transformers", action="store_true", help="also transformers' generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    peers = start_peers(args)
    try:
        figures = measure(peers, args.rounds)
    finally:
        for peer in peers:
            peer.server.close()
    report(figures)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
