"""A live server in a thread, with the scripted engine behind it."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from byte_backend import byte_backend
from scripted_engine import ScriptedEngine

from api_client import ApiClient
from truespec.config import EngineConfig, ServerConfig
from truespec.constrained.grammar import compile_error
from truespec.server.app import build_app
from truespec.server.engine_client import Endpoints, EngineClient
from truespec.server.metrics import Metrics
from truespec.server.service import Service
from truespec.tokenizer.manager import TokenizerManager
from truespec.tokenizer.token_table import TokenTable


@dataclass
class Live(ApiClient):
    """A running server."""

    service: Service
    engine: ScriptedEngine
    failures: list[str]
    loops: list[asyncio.AbstractEventLoop]

    def call(self, function, *args: object) -> None:
        """Run a function in the server's thread."""
        self.loops[0].call_soon_threadsafe(function, *args)

    def wait(self, condition) -> None:
        """Until `condition()` holds; fails after five seconds."""
        for _ in range(500):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("the condition did not come true")


@contextmanager
def live_server(
    config: ServerConfig | None = None,
    engine_config: EngineConfig | None = None,
    *,
    ready: bool = True,
) -> Iterator[Live]:
    """A server on a free port; gone after the block."""
    config = config or ServerConfig()
    engine_config = engine_config or EngineConfig(model_path="models/scripted")
    backend = byte_backend()
    compat = [name for name in config.metrics_compat.split(",") if name]
    service = Service(
        config=config,
        engine_config=engine_config,
        backend=backend,
        table=TokenTable(backend),
        metrics=Metrics("scripted", compat),
        model_name="scripted",
        grammar_error=compile_error,
        started=time.time(),
    )
    failures: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []
    with tempfile.TemporaryDirectory() as directory:
        endpoints = Endpoints(f"ipc://{directory}/in", f"ipc://{directory}/out")

        @asynccontextmanager
        async def background() -> AsyncIterator[None]:
            loops.append(asyncio.get_running_loop())
            service.client = EngineClient(
                endpoints,
                TokenizerManager(service.table),
                service.metrics,
                max_open=engine_config.max_running_requests + engine_config.max_queued_requests,
                on_ready=service.on_ready,
                on_failed=failures.append,
            )
            task = asyncio.create_task(service.client.run())
            yield
            task.cancel()
            service.client.shutdown()

        engine = ScriptedEngine(endpoints, backend, ready=ready)
        app = build_app(service, background)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30) as http:
            live = Live(url, http, service, engine, failures, loops)
            if ready:
                live.wait(lambda: service.client.status == "ready")
            yield live
        server.should_exit = True
        thread.join(10)
        engine.join()
