"""An engine for tests of the server alone: real messages over real sockets, made-up tokens.

A prompt that contains `say:TEXT|` is answered with TEXT, byte by byte, then end-of-sequence.
Other prompts are continued by the best next token of a fixed random table. Logprobs of a token are
those of the table's row for the token before it. `fail:` fails after two tokens, `hang:` waits for
an abort. A step emits up to four tokens: accepted drafts and one of the target's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import zmq

from truespec.core import Finish, ModeLogprobs, TokenRecord
from truespec.message import (
    Abort,
    CacheFlushed,
    EngineProgress,
    EngineReady,
    EngineState,
    EngineStats,
    FlushCache,
    FromEngine,
    GetState,
    Output,
    Outputs,
    Shutdown,
    Submit,
    ToEngine,
)
from truespec.params import LogprobParams

VOCAB_SIZE = 304  # more rows than the tokenizer has ids, as real heads have
EOS_IDS = (2, 11)
CONTEXT_LENGTH = 4096
NUM_DRAFTS = 3


def table_row(previous: int) -> np.ndarray:
    """[VOCAB_SIZE] float64 logits after a token."""
    return np.random.default_rng(previous).normal(size=VOCAB_SIZE) * 2


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of one row."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def mode_logprobs(previous: int, token_id: int, top_k: int, asked: LogprobParams, mode: str):
    """Logprobs of `token_id` after `previous`; "temperature" counts as T = 2, filters cut at 50."""
    row = log_softmax(table_row(previous) / (1 if mode == "raw" else 2))
    order = np.argsort(-row, kind="stable")
    kept = set(order[:50].tolist()) if mode == "processed" else set(range(VOCAB_SIZE))
    best = [int(i) for i in order[:top_k]]
    values = [float(row[i]) if i in kept else None for i in asked.token_ids]
    return ModeLogprobs(float(row[token_id]), best, [float(row[i]) for i in best], values)


def make_record(previous: int, token_id: int, asked: LogprobParams | None, **fields: object):
    """A record with the logprobs of the table."""
    if asked is None:
        return TokenRecord(token_id, **fields)
    modes = tuple(mode_logprobs(previous, token_id, asked.top_k, asked, m) for m in asked.modes)
    row = table_row(previous)
    rank = 1 + int((row > row[token_id]).sum())
    return TokenRecord(token_id, modes=modes, rank=rank, entropy=1.5, **fields)


def prompt_records(submit: Submit) -> list[TokenRecord]:
    """Scored prompt entries from `start` on; the first token has no logprob."""
    asked, ids = submit.params.logprobs, submit.prompt_ids
    if asked is None or asked.start < 0:
        return []
    records = []
    for position in range(asked.start, len(ids)):
        if position == 0:
            records.append(TokenRecord(ids[0], "prompt", modes=(ModeLogprobs(None),)))
            continue
        previous, token_id = ids[position - 1], ids[position]
        mode = mode_logprobs(previous, token_id, asked.prompt_top_k, asked, "raw")
        rank = 1 + int((table_row(previous) > table_row(previous)[token_id]).sum())
        records.append(TokenRecord(token_id, "prompt", modes=(mode,), rank=rank, entropy=1.5))
    return records


class Running:
    """A request inside the scripted engine."""

    def __init__(self, submit: Submit, text: str, encode) -> None:
        self.submit = submit
        self.output: list[int] = []
        self.hangs = "hang:" in text
        self.fails = "fail:" in text
        self.slow = "slow:" in text
        script = text.split("say:", 1)[1].split("|", 1)[0] if "say:" in text else None
        self.script = None if script is None else [*encode(script), EOS_IDS[len(script) % 2]]

    def step(self) -> Output:
        """The next tokens, cut at ids and limits."""
        params = self.submit.params
        is_first = not self.output
        count = 1 if is_first or not params.speculative else 1 + len(self.output) % (NUM_DRAFTS + 1)
        records: list[TokenRecord] = []
        finish = Finish("length") if params.max_tokens == 0 else None
        while finish is None and len(records) < count:
            records.append(self._record(len(records), count, is_first))
            finish = self._finish(records[-1].token_id)
        first = prompt_records(self.submit) if is_first else []
        return Output(self.submit.rid, records, finish, first, num_cached_tokens=0)

    def _record(self, place: int, count: int, is_first: bool) -> TokenRecord:
        ids = self.submit.prompt_ids + self.output
        scripted = self.script is not None and len(self.output) < len(self.script)
        token_id = self.script[len(self.output)] if scripted else int(table_row(ids[-1]).argmax())
        self.output.append(token_id)
        is_draft = place < count - 1
        return make_record(
            ids[-1],
            token_id,
            self.submit.params.logprobs,
            origin="prefill" if is_first else "draft" if is_draft else "target",
            position=place,
            num_drafts=0 if is_first or not self.submit.params.speculative else NUM_DRAFTS,
            draft_logprob=-0.5 if is_draft else None,
        )

    def _finish(self, token_id: int) -> Finish | None:
        params = self.submit.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS_IDS))
        if token_id in stops:
            return Finish("stop", token_id)
        if self.fails and len(self.output) == 2:
            return Finish("error", message="a row was NaN")
        return Finish("length") if len(self.output) == params.max_tokens else None


class ScriptedEngine:
    """The engine's end of two sockets, in a thread.

    Attributes:
        submitted, aborted: every message that came, in order.
        steps: an optional pause before each step, in seconds.
    """

    def __init__(self, endpoints: Sequence[str], backend, *, ready: bool = True) -> None:
        self.submitted: list[Submit] = []
        self.aborted: list[Abort] = []
        self._endpoints = endpoints
        self._backend = backend
        self._ready = ready
        self._running: dict[str, Running] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which the server's shutdown message brings."""
        self._thread.join(5)
        assert not self._thread.is_alive(), "the server sent no Shutdown"

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        context = zmq.Context()
        self._pull, self._push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._pull.connect(self._endpoints[0])
        self._push.connect(self._endpoints[1])
        self._send(EngineProgress("loading weights"))
        if self._ready:
            self._send(EngineReady(options(), {"weights": 0.5}))
        try:
            while self._receive():
                self._step()
        finally:
            context.destroy(linger=200)

    def _receive(self) -> bool:
        has_work = any(not request.hangs for request in self._running.values())
        while self._pull.poll(0 if has_work else 20):
            message = self._decoder.decode(self._pull.recv())
            if isinstance(message, Shutdown):
                return False
            self._handle(message)
            has_work = True
        return True

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self.submitted.append(message)
                text = self._backend.decode(message.prompt_ids, skip_special_tokens=False)
                encode = lambda script: list(self._backend.encode(script, False))  # noqa: E731
                self._running[message.rid] = Running(message, text, encode)
            case Abort():
                self.aborted.append(message)
                if self._running.pop(message.rid, None) is not None:
                    finish = Finish("abort", message=message.reason)
                    self._send(Outputs([Output(message.rid, [], finish)]))
            case FlushCache():
                self._send(CacheFlushed(message.rid, 7))
            case GetState():
                self._send(EngineState(message.rid, self._stats()))

    def _step(self) -> None:
        active = [request for request in self._running.values() if not request.hangs]
        if any(request.slow for request in active):
            time.sleep(0.05)
        outputs = [request.step() for request in active]
        for output in outputs:
            if output.finish is not None:
                del self._running[output.rid]
        if outputs:
            self._send(Outputs(outputs, self._stats()))

    def _stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 100, 25, 10, 16, 200, 50, 9, 99, 0)

    def _send(self, message: FromEngine) -> None:
        self._push.send(self._encoder.encode(message))


def options() -> dict[str, object]:
    """What a ready engine reports."""
    return {
        "vocab_size": VOCAB_SIZE,
        "context_length": CONTEXT_LENGTH,
        "max_total_tokens": 2 * CONTEXT_LENGTH,
        "max_logprobs": 20,
        "logprobs_mode": "raw",
        "eos_token_ids": list(EOS_IDS),
        "generation_defaults": {"temperature": 0.25, "top_k": 7},
        "speculative": {"algorithm": "SCRIPT", "num_drafts": NUM_DRAFTS},
    }
