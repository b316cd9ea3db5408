"""Messages between the process that talks to clients and the process that runs the engine.

Plain data, encoded with msgpack; no behaviour and no torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from truespec.core import Finish, TokenRecord
from truespec.params import SamplingParams


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A validated request. `params.seed` is set; ids are inside the vocabulary."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a request: its client left, or a stop string matched. No answer if it is over."""

    rid: str
    reason: str = ""


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache (only what no running request uses)."""

    rid: str


class GetState(msgspec.Struct, frozen=True, tag=True):
    """Ask for an `EngineState`."""

    rid: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish at once; every open request is aborted."""


ToEngine = Submit | Abort | FlushCache | GetState | Shutdown


class Output(msgspec.Struct, frozen=True, tag=True):
    """New records of one request.

    Attributes:
        records: what this step committed, already cut at ids and limits.
        prompt_records: scored prompt entries from `logprobs.start` on, complete and once, in the
            first output of a request that asked for them.
        finish: set in the last message of the request, exactly once.
        num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    rid: str
    records: list[TokenRecord]
    finish: Finish | None = None
    prompt_records: list[TokenRecord] = []
    num_cached_tokens: int = 0


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one engine step, in one message."""

    outputs: list[Output]
    stats: EngineStats | None = None


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """Gauges and running totals of the engine, sent now and then with outputs.

    All counts are totals since start except `num_running`, `num_waiting`, `num_pages_used`.
    Acceptance counts of kept tokens are made from records by the tokenizer room, not here.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_used: int
    num_pages_cached: int
    page_size: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_steps: int
    num_forward_rows: int
    num_retractions: int


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Sent once when the engine can serve.

    Attributes:
        options: the resolved config as plain JSON data, for `/server_info`.
        phases: seconds per start phase.
    """

    options: dict[str, Any]
    phases: dict[str, float]


class EngineProgress(msgspec.Struct, frozen=True, tag=True):
    """What the engine is doing while it starts; shown by `/health` and in the log."""

    phase: str
    done: float = 0.0


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start or died; the server answers 503 and exits."""

    message: str


class EngineState(msgspec.Struct, frozen=True, tag=True):
    """Answer to `GetState`."""

    rid: str
    stats: EngineStats


class CacheFlushed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `FlushCache`."""

    rid: str
    num_pages: int


FromEngine = Outputs | EngineReady | EngineProgress | EngineFailed | EngineState | CacheFlushed
