"""The engine process: a scheduler between two sockets. Messages in, messages out, nothing else."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import msgspec
import zmq

from truespec.config import EngineConfig
from truespec.constrained.vocabulary import LoadTokens
from truespec.engine.worker import Worker
from truespec.message import (
    Abort,
    CacheFlushed,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineState,
    FlushCache,
    FromEngine,
    GetState,
    Output,
    Outputs,
    Submit,
    ToEngine,
)
from truespec.scheduler.scheduler import Scheduler
from truespec.speculative.registry import build_worker

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1000  # how often an idle engine looks whether its server is still there
STATS_SECONDS = 0.5


def run_engine_process(
    engine_config: EngineConfig, load_tokens: LoadTokens, endpoint_in: str, endpoint_out: str
) -> None:
    """Serve until the server goes away. Meant as the target of a spawned process.

    Args:
        engine_config: unresolved options.
        load_tokens: gives the tokenizer when the first grammar needs it.
        endpoint_in: zmq address to pull `ToEngine` messages from.
        endpoint_out: zmq address to push `FromEngine` messages to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    _die_with_parent()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, endpoint in ((inbox, endpoint_in), (outbox, endpoint_out)):
        socket.setsockopt(zmq.LINGER, 1000)
        socket.set_hwm(0)
        socket.connect(endpoint)
    link = _Link(inbox, outbox)
    try:
        worker, config, phases = build_worker(
            engine_config,
            lambda phase, done: link.send(EngineProgress(phase, done)),
            load_tokens,
        )
        scheduler = Scheduler(worker, max_prefill_rows=config.chunked_prefill_size)
        link.send(EngineReady(_options(config, worker, scheduler), phases))
        _serve(link, scheduler)
    except Exception as error:
        logger.exception("the engine stopped")
        link.send(EngineFailed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error
    finally:
        context.destroy(linger=1000)


class _Link:
    """Typed messages over a pair of sockets."""

    def __init__(self, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """Everything that has arrived; waits up to `timeout_ms` for the first message."""
        messages: list[ToEngine] = []
        while self._inbox.poll(0 if messages else timeout_ms):
            messages.append(self._decoder.decode(self._inbox.recv()))
        return messages


def _serve(link: _Link, scheduler: Scheduler) -> None:
    last_stats = 0.0
    while True:
        answers: list[Output] = []
        for message in link.receive(0 if scheduler.has_work else IDLE_POLL_MS):
            if isinstance(message, Submit):
                scheduler.submit(message)
            elif isinstance(message, Abort):
                aborted = scheduler.abort(message)
                answers += [aborted] if aborted is not None else []
            elif isinstance(message, FlushCache):
                link.send(CacheFlushed(message.rid, scheduler.flush_cache()))
            elif isinstance(message, GetState):
                link.send(EngineState(message.rid, scheduler.stats()))
            else:
                return
        answers += scheduler.step()
        now = time.monotonic()
        stats = None
        if now - last_stats > STATS_SECONDS or (answers and not scheduler.has_work):
            stats, last_stats = scheduler.stats(), now
        if answers or stats is not None:
            link.send(Outputs(answers, stats))


def _options(config: EngineConfig, worker: Worker, scheduler: Scheduler) -> dict[str, object]:
    info = worker.info
    options: dict[str, object] = msgspec.to_builtins(config)
    return options | {
        "model_name": info.name,
        "vocab_size": info.vocab_size,
        "context_length": scheduler.max_request_tokens,
        "eos_token_ids": list(info.eos_token_ids),
        "max_total_tokens": worker.cache.num_pages * worker.cache.page_size,
        "generation_defaults": dict(info.generation_defaults),
        "speculative": worker.describe(),
    }


def _die_with_parent() -> None:
    """A watcher thread ends this process when the server that spawned it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
