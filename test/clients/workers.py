"""Servers of every worker on one tiny random target, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
from processes import started

import tiny_drafters
from api_client import ApiClient
from tiny import VOCAB_SIZE, tiny_checkpoint

MODEL_NAME = "tiny"
EOS_IDS = (2, 11)
Writer = Callable[[Path], Path]
DRAFTERS: dict[str, Writer] = {
    "dspark": partial(tiny_drafters.dspark, vocab=VOCAB_SIZE),
    "eagle": partial(tiny_drafters.eagle3, vocab=VOCAB_SIZE, draft_vocab=256),
}
# Draft lengths are fixed: measured costs would tell that drafting does not pay for a tiny model.
# Every worker cuts prompts into chunks of another size.
WORKERS = {
    "plain": "--chunked-prefill-size 256",
    "ngram": "--speculative-algorithm NGRAM --chunked-prefill-size 4",
    "dspark": "--speculative-algorithm DSPARK --chunked-prefill-size 16",
    "eagle": "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 2"
    " --speculative-num-draft-tokens 7 --chunked-prefill-size 7",
}


class Servers:
    """Servers by the name of their worker, started when they are first asked for."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack
        self._clients: dict[str, ApiClient] = {}

    def __getitem__(self, name: str) -> ApiClient:
        if name not in self._clients:
            self._clients[name] = self._start(name)
        return self._clients[name]

    def _start(self, name: str) -> ApiClient:
        flags = f"{WORKERS[name]} --no-speculative-adaptive --metrics-compat vllm,sglang"
        flags += f" --served-model-name {MODEL_NAME}"
        if name in DRAFTERS:
            path = DRAFTERS[name](self._root / name)
            flags += f" --speculative-draft-model-path {path}"
        server = self._stack.enter_context(started(self.target, *flags.split()))
        http = self._stack.enter_context(httpx.Client(base_url=server.url, timeout=120))
        return ApiClient(server.url, http)

    @property
    def target(self) -> Path:
        """The checkpoint that all serve."""
        directory = self._root / "target"
        if not directory.exists():
            tiny_checkpoint(directory, "llama", eos_token_id=list(EOS_IDS))
        return directory
