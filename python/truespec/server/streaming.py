"""Waits for generations on behalf of HTTP clients: whole or as server-sent events.

Watches for the client's end of the connection; a client that leaves ends its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from truespec.core import Finish
from truespec.tokenizer.request_state import Piece

from .engine_client import Generation
from .errors import ApiError
from .logprobs import JSONValue

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED = 499


class Stream(Protocol):
    """What a dialect sends as a stream; chunks are JSON data."""

    def opening(self) -> Iterable[JSONValue]:
        """Chunks before any output."""
        ...

    def render(self, index: int, pieces: Sequence[Piece]) -> Iterable[JSONValue]:
        """Chunks for new pieces of a choice."""
        ...

    def closing(self) -> Iterable[JSONValue]:
        """Chunks after all output."""
        ...


class Batcher:
    """Groups the pieces of each choice into chunks of `interval` engine steps.

    With `one_per_piece` and an interval of 1 every piece is a chunk of its own.
    """

    def __init__(self, num_choices: int, interval: int, *, one_per_piece: bool) -> None:
        self._interval = interval
        self._one_per_piece = one_per_piece and interval == 1
        self._held: list[list[Piece]] = [[] for _ in range(num_choices)]
        self._num_steps = [0] * num_choices

    def take(self, index: int, pieces: Sequence[Piece]) -> list[Piece]:
        """New pieces of one engine step; the chunks that are complete now."""
        if self._one_per_piece:
            return list(pieces)
        held = self._held[index]
        held.extend(pieces)
        self._num_steps[index] += 1
        if not held or (held[-1].finish is None and self._num_steps[index] < self._interval):
            return []
        self._num_steps[index] = 0
        self._held[index] = []
        return [_merged(held)]


class EventStream(Response):
    """An ASGI response that streams one generation."""

    def __init__(self, generation: Generation, stream: Stream) -> None:
        super().__init__()
        self._generation = generation
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, then `[DONE]`."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with watched(self._generation, receive):
            data = _events(self._stream.opening())
            while not self._generation.left:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if self._generation.is_done:
                    break
                data = self._render(await self._generation.next_events())
        if not self._generation.left:
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _render(self, events: Sequence[tuple[int, list[Piece]]]) -> bytes:
        """All that arrived, as one write. An error ends the stream: nothing follows it."""
        parts: list[bytes] = []
        for index, pieces in events:
            failure = failure_of(pieces)
            if failure is not None:
                self._generation.close()
                return b"".join([*parts, _events([self._generation.error(failure).body])])
            parts.append(_events(self._stream.render(index, pieces)))
        if self._generation.is_done:
            parts.append(_events(self._stream.closing()))
        return b"".join(parts)


@asynccontextmanager
async def watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """While the block runs, a client that leaves ends the generation; so does an exception."""
    watcher = asyncio.create_task(_watch(generation, receive))
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


async def finished(generation: Generation, receive: Receive) -> None:
    """Wait for every choice. Raises `ApiError` when one failed or the client left."""
    async with watched(generation, receive):
        await generation.wait()
    if generation.left:
        raise ApiError(CLIENT_CLOSED, "the client left")
    for state in generation.choices:
        if state.finish is not None and state.finish.kind == "error":
            raise generation.error(state.finish)


def failure_of(pieces: Sequence[Piece]) -> Finish | None:
    """The finish of a choice that failed with these pieces."""
    finish = pieces[-1].finish if pieces else None
    return finish if finish is not None and finish.kind == "error" else None


async def _watch(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.leave()


def _events(chunks: Iterable[JSONValue]) -> bytes:
    return b"".join([b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks])


def _merged(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        [record for piece in pieces for record in piece.records],
        [offset for piece in pieces for offset in piece.offsets],
        "".join([piece.text for piece in pieces]),
        pieces[-1].finish,
    )
