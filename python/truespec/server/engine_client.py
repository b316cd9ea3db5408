"""The server's end of the engine process: sends requests, hands pieces to whoever waits for them.

Knows sockets and the tokenizer room's manager; must not know HTTP. All methods run in the event
loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import msgspec
import zmq
import zmq.asyncio

from truespec.core import Finish
from truespec.message import (
    Abort,
    CacheFlushed,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineState,
    EngineStats,
    FlushCache,
    FromEngine,
    GetState,
    Outputs,
    Shutdown,
    Submit,
    ToEngine,
)
from truespec.tokenizer.manager import TokenizerManager
from truespec.tokenizer.request_state import Piece, RequestState

from .errors import ApiError, queue_full, unavailable
from .metrics import Metrics
from .names import name_of

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", EngineState, CacheFlushed)
ANSWER_SECONDS = 30.0


class Endpoints(NamedTuple):
    """Addresses of the two sockets: `ToEngine` messages one way, `FromEngine` the other."""

    to_engine: str
    from_engine: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked choice of a prompt, ready to be sent.

    Attributes:
        pending: unfinished character at the end of an echoed prompt.
    """

    submit: Submit
    pending: bytes = b""


class Generation:
    """The choices of one HTTP request while they run.

    Attributes:
        choices: in the reply's order.
        left: the reader is gone; nobody waits any more.
    """

    def __init__(self, client: EngineClient, choices: list[RequestState]) -> None:
        self.choices = choices
        self.left = False
        self._client = client
        self._index = {state.rid: index for index, state in enumerate(choices)}
        self._num_open = len(choices)
        self._events: list[tuple[int, list[Piece]]] = []
        self._arrived = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Every choice has ended, and all that it sent was taken."""
        return self._num_open == 0 and not self._events

    def put(self, state: RequestState, pieces: list[Piece]) -> None:
        """Take new pieces of a choice; called by the client."""
        self._events.append((self._index[state.rid], pieces))
        if state.finish is not None:
            self._num_open -= 1
        self._arrived.set()

    async def next_events(self) -> list[tuple[int, list[Piece]]]:
        """All that arrived since the last call, waiting for at least one; (choice, pieces)."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events

    async def wait(self) -> None:
        """Until every choice is over or the reader left."""
        while not (self.is_done or self.left):
            await self.next_events()

    def leave(self) -> None:
        """The reader is gone: whoever waits goes on and finds `left` set."""
        self.left = True
        self._arrived.set()

    def error(self, finish: Finish) -> ApiError:
        """What to answer for a choice that failed: a 503 when the engine is gone, else a 500."""
        message = finish.message or "the request failed"
        if self._client.status == "failed":
            return unavailable(message, "engine_failed")
        return ApiError(500, message, code="generation_failed")

    def close(self) -> None:
        """Abort what still runs and drop what was not taken; the reader is done or gone."""
        self._num_open = 0
        self._events.clear()
        self._client.close(self)


class EngineClient:
    """Requests to and replies from the engine process.

    Attributes:
        status: "loading" until the engine is ready, "failed" after it failed or died.
        phase: what the engine is doing, while it loads; why it failed, after that.
        ready: what the engine reported when it became ready.
        stats: the engine's last gauges.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        manager: TokenizerManager,
        metrics: Metrics,
        *,
        max_open: int,
        on_ready: Callable[[EngineReady], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Bind both sockets; the engine connects.

        Args:
            max_open: requests that run or wait at most.
            on_ready, on_failed: called once, when the engine is ready or gone.
        """
        self.status: Literal["loading", "ready", "failed"] = "loading"
        self.phase = "starting"
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.max_open = max_open
        self._manager = manager
        self._metrics = metrics
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._generations: dict[str, Generation] = {}
        self._answers: dict[str, asyncio.Future[EngineState | CacheFlushed]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.asyncio.Context()
        self._push = self._socket(zmq.PUSH, endpoints.to_engine)
        self._pull = self._socket(zmq.PULL, endpoints.from_engine)

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return len(self._manager)

    @property
    def rids(self) -> list[str]:
        """The engine's names of open requests."""
        return self._manager.rids

    def is_open(self, name: str) -> bool:
        """A request that clients call so runs or waits."""
        return any(name_of(rid) == name for rid in self.rids)

    def check_ready(self) -> None:
        """Raise a 503 that names the phase unless the engine can serve."""
        if self.status == "loading":
            raise unavailable(f"the server is loading: {self.phase}", "loading")
        if self.status == "failed":
            raise unavailable(f"the engine is gone: {self.phase}", "engine_failed")

    def open(self, prepared: Sequence[Prepared]) -> Generation:
        """Send the choices of a request. Raises a 429 when they do not fit into the queue."""
        self.check_ready()
        if self.num_open + len(prepared) > self.max_open:
            raise queue_full(self.num_open, self.max_open)
        states = [self._manager.open(item.submit, pending=item.pending) for item in prepared]
        generation = Generation(self, states)
        for item in prepared:
            self._generations[item.submit.rid] = generation
            self._metrics.count_start(item.submit.rid)
            self._send(item.submit)
        return generation

    def close(self, generation: Generation) -> None:
        """Forget a request and abort what still runs of it."""
        for state in generation.choices:
            self._generations.pop(state.rid, None)
            message = self._manager.close(state.rid, "the client left")
            if message is not None:
                self._send(message)
                self._metrics.count_finish(state, "abort")

    def abort(self, rid: str) -> None:
        """Ask the engine to end a request; its reader gets a last message with reason abort."""
        self._send(Abort(rid, "aborted by request"))

    async def get_state(self) -> EngineStats:
        """The engine's gauges, now."""
        rid = f"state-{secrets.token_hex(8)}"
        return (await self._ask(GetState(rid), rid, EngineState)).stats

    async def flush_cache(self) -> int:
        """Empty the prefix cache; the number of freed pages."""
        rid = f"flush-{secrets.token_hex(8)}"
        return (await self._ask(FlushCache(rid), rid, CacheFlushed)).num_pages

    async def run(self) -> None:
        """Handle the engine's messages until the task is cancelled."""
        while True:
            for data in await self._pull.recv_multipart():
                self._handle(self._decoder.decode(data))

    def fail(self, reason: str) -> None:
        """The engine is gone: end every open request, refuse new ones. Later calls do nothing."""
        if self.status == "failed":
            return
        self.status, self.phase = "failed", reason
        log.error("the engine is gone: %s", reason)
        for state, pieces in self._manager.fail_all(reason):
            self._deliver(state, pieces)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(unavailable(f"the engine is gone: {reason}", "engine_failed"))
        self._on_failed(reason)

    def shutdown(self) -> None:
        """Tell the engine to end and close the sockets."""
        self._send(Shutdown())
        self._push.close(linger=500)
        self._pull.close(linger=0)
        self._context.term()

    def _socket(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # nothing is dropped; `max_open` bounds what is under way
        socket.bind(endpoint)
        return socket

    def _send(self, message: ToEngine) -> None:
        # NOTE: on a socket without a high-water mark this completes at once, so the future that
        # zmq.asyncio returns needs no waiting.
        self._push.send(self._encoder.encode(message))

    async def _ask(self, message: ToEngine, rid: str, kind: type[Answer]) -> Answer:
        self.check_ready()
        future = asyncio.get_running_loop().create_future()
        self._answers[rid] = future
        self._send(message)
        try:
            answer = await asyncio.wait_for(future, ANSWER_SECONDS)
        finally:
            del self._answers[rid]
        assert isinstance(answer, kind), f"expected {kind}, got {answer}"
        return answer

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._handle_outputs(message)
            case EngineState() | CacheFlushed():
                future = self._answers.get(message.rid)
                if future is not None and not future.done():
                    future.set_result(message)
            case EngineProgress():
                self.phase = message.phase
                log.info("%s", message.phase)
            case EngineReady():
                self.ready = message
                self._on_ready(message)
                self.status = "ready"
            case EngineFailed():
                self.fail(message.message)

    def _handle_outputs(self, outputs: Outputs) -> None:
        if outputs.stats is not None:
            self.stats = outputs.stats
        fed = self._manager.feed(outputs)
        for message in fed.aborts:
            self._send(message)
        for state, pieces in fed.released:
            self._deliver(state, pieces)

    def _deliver(self, state: RequestState, pieces: list[Piece]) -> None:
        generation = self._generations.get(state.rid)
        if generation is None:
            return
        self._metrics.observe(state, pieces)
        if state.finish is not None:
            del self._generations[state.rid]
            self._metrics.count_finish(state, state.finish.kind)
        generation.put(state, pieces)
