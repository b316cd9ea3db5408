"""Composition root of the server: the engine's process, the tokenizer, the HTTP server."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.process import BaseProcess

import orjson
import uvicorn

from truespec.config import EngineConfig, ServerConfig
from truespec.constrained.grammar import compile_error
from truespec.constrained.vocabulary import special_texts
from truespec.message import EngineReady
from truespec.tokenizer.backend import load_tokenizer
from truespec.tokenizer.manager import TokenizerManager
from truespec.tokenizer.token_table import TokenTable

from .app import build_app
from .engine_client import Endpoints, EngineClient
from .engine_process import engine_main
from .metrics import COMPAT_NAMES, Metrics
from .service import Service, model_name_of

log = logging.getLogger(__name__)
DRAIN_SECONDS = 5  # for open replies, after the server was told to stop
ENGINE_SECONDS = 1.0  # for the engine; it has nothing to save


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Run the server until it is stopped. Returns the exit status: 1 when the engine was lost."""
    logging.basicConfig(
        level=server_config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: tidily
    begin = time.monotonic()
    compat = _compat_names(server_config.metrics_compat)
    _check(server_config)
    listener = _listen(server_config)  # before anything slow: a port in use is said at once
    server_config = replace(server_config, port=listener.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="truespec-") as directory:
        endpoints = Endpoints(*[f"ipc://{directory}/{name}" for name in ("in", "out")])
        process = _start_engine(engine_config, endpoints, server_config.log_level)
        try:
            service = _service(engine_config, server_config, compat)
            log.info("tokenizer loaded in %.2f s", time.monotonic() - begin)
            return _run(service, process, endpoints, listener, begin)
        except KeyboardInterrupt:
            return 0
        except BaseException:
            process.kill()  # it was not told to end
            raise
        finally:
            _stop_engine(process)
            listener.close()


def _check(config: ServerConfig) -> None:
    if not 0 <= config.port < 2**16:
        raise ValueError(f"--port is {config.port}, expected 0 (any) to 65535")
    if config.stream_interval < 1:
        raise ValueError(f"--stream-interval is {config.stream_interval}, expected 1 or more")


def _compat_names(given: str) -> Sequence[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in names if name not in COMPAT_NAMES]
    if unknown:
        raise ValueError(f"--metrics-compat has {unknown}, expected some of {COMPAT_NAMES}")
    return names


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # NOTE: asyncio sets TCP_NODELAY only where the protocol is named. Without it, the second write
    # of every reply and every chunk of a stream waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return listener


def _start_engine(config: EngineConfig, endpoints: Endpoints, log_level: str) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=engine_main, args=(config, *endpoints, log_level), name="truespec-engine"
    )
    process.start()
    return process


def _stop_engine(process: BaseProcess) -> None:
    process.join(ENGINE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def _service(
    engine_config: EngineConfig, server_config: ServerConfig, compat: Sequence[str]
) -> Service:
    backend = load_tokenizer(
        engine_config.tokenizer_path or engine_config.model_path, engine_config.chat_template
    )
    name = model_name_of(server_config, engine_config)
    return Service(
        config=server_config,
        engine_config=engine_config,
        backend=backend,
        table=TokenTable(backend),
        metrics=Metrics(name, compat),
        model_name=name,
        grammar_error=partial(compile_error, special_tokens=special_texts(backend)),
        started=time.time(),
    )


def _run(
    service: Service,
    process: BaseProcess,
    endpoints: Endpoints,
    listener: socket.socket,
    begin: float,
) -> int:
    config = service.config
    lost: list[str] = []

    def on_ready(ready: EngineReady) -> None:
        service.on_ready(ready)
        # What start-up made stays: a collection that visited it would hold up every stream.
        gc.collect()
        gc.freeze()
        sys.stdout.write(start_report(service, ready, time.monotonic() - begin))
        sys.stdout.flush()

    def on_failed(reason: str) -> None:
        lost.append(reason)
        server.should_exit = True

    @asynccontextmanager
    async def background() -> AsyncIterator[None]:
        """The engine's client lives as long as the event loop."""
        client = EngineClient(
            endpoints,
            TokenizerManager(service.table),
            service.metrics,
            max_open=service.engine_config.max_running_requests
            + service.engine_config.max_queued_requests,
            on_ready=on_ready,
            on_failed=on_failed,
        )
        service.client = client
        async with running(client, process):
            yield

    app = build_app(service, background)
    level = "debug" if config.log_level == "debug" else "warning"
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level=level, access_log=False, timeout_graceful_shutdown=DRAIN_SECONDS
        )
    )
    server.run(sockets=[listener])
    return 1 if lost else 0


@asynccontextmanager
async def running(client: EngineClient, process: BaseProcess) -> AsyncIterator[None]:
    """Handle the engine's messages and notice its death, while the block runs."""
    loop = asyncio.get_running_loop()
    receiver = loop.create_task(client.run())
    receiver.add_done_callback(lambda task: _fail_if_broken(client, task))

    def died() -> None:
        loop.remove_reader(process.sentinel)
        process.join(1)
        # NOTE: a last message (why it failed) may be under way; it has the better reason.
        loop.call_later(0.2, client.fail, f"the engine process ended with {process.exitcode}")

    loop.add_reader(process.sentinel, died)
    try:
        yield
    finally:
        loop.remove_reader(process.sentinel)
        receiver.cancel()
        client.shutdown()


def _fail_if_broken(client: EngineClient, task: asyncio.Task[None]) -> None:
    """A message that cannot be handled is our own mistake: nobody may wait for it for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the engine's messages cannot be handled", exc_info=error)
        client.fail(f"internal error: {error}")


def start_report(service: Service, ready: EngineReady, seconds: float) -> str:
    """The resolved options, a time per phase, and a curl line that works as it is."""
    shown = {**ready.options, **asdict(service.config)}
    shown["api_key"] = "(set)" if service.config.api_key else None
    options = "\n".join(f"  {name} = {value}" for name, value in sorted(shown.items()))
    phases = "\n".join(f"  {name}: {taken:.2f} s" for name, taken in ready.phases.items())
    return (
        f"options\n{options}\nstart\n{phases}\n  total: {seconds:.2f} s\n"
        f"ready at {_url(service.config)}; try\n{curl_line(service)}\n"
    )


def curl_line(service: Service) -> str:
    """A command that generates a few tokens with their logprobs."""
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    key = " -H 'Authorization: Bearer '$API_KEY" if service.config.api_key else ""
    return (
        f"curl {_url(service.config)}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d '{orjson.dumps(body).decode()}'"
    )


def _url(config: ServerConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{config.port}"
