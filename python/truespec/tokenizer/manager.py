"""Keeps the state of every open request and turns engine messages into pieces of output.

The server (asynchronous, over a socket) and the offline `LLM` (in process) both use it. It does no
input or output: it returns the messages that its owner has to send to the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from truespec.core import Finish
from truespec.message import Abort, Outputs, Submit

from .request_state import Piece, RequestState
from .token_table import TokenTable


class Fed(NamedTuple):
    """What one engine message led to.

    Attributes:
        released: requests with new pieces, in the engine's order.
        aborts: to be sent to the engine: requests that a stop string or expression ended.
    """

    released: list[tuple[RequestState, list[Piece]]]
    aborts: list[Abort]


class TokenizerManager:
    """Open requests by name. A request leaves with its last piece, or when it is closed."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, rid: str) -> bool:
        return rid in self._states

    @property
    def rids(self) -> list[str]:
        """Names of the open requests, a new list."""
        return list(self._states)

    def open(self, submit: Submit, *, pending: bytes = b"") -> RequestState:
        """Begin a request; its owner sends `submit` to the engine.

        `pending` is an unfinished character at the end of an echoed prompt.
        """
        assert submit.rid not in self._states, f"request {submit.rid} is open already"
        state = RequestState(submit, self._table, pending=pending)
        self._states[submit.rid] = state
        return state

    def feed(self, outputs: Outputs) -> Fed:
        """Take the outputs of one engine step; those of requests that are over are dropped."""
        fed = Fed([], [])
        for output in outputs.outputs:
            state = self._states.get(output.rid)
            if state is None:
                continue
            pieces = state.feed(output)
            if state.finish is not None:
                del self._states[output.rid]
                if output.finish is None:
                    fed.aborts.append(Abort(output.rid, "a stop string matched"))
            if pieces or output.prompt_records:
                fed.released.append((state, pieces))
        return fed

    def close(self, rid: str, reason: str) -> Abort | None:
        """Forget a request whose reader left; the message for the engine if it was still open."""
        state = self._states.pop(rid, None)
        return Abort(rid, reason) if state is not None else None

    def fail_all(self, message: str) -> list[tuple[RequestState, list[Piece]]]:
        """End every open request because the engine is gone."""
        states = list(self._states.values())
        self._states.clear()
        return [(state, state.fail(Finish("error", message=message))) for state in states]
