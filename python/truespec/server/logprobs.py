"""Logprobs of records in the two shapes of the /v1 routes, and `prompt_logprobs`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truespec.core import ModeLogprobs, TokenRecord
from truespec.params import LogprobMode
from truespec.tokenizer.token_table import TokenTable

JSONValue = object
BELOW_RANGE = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobView:
    """How a reply shows logprobs.

    Attributes:
        top_k: alternatives per entry.
        asked_ids: shown beside the alternatives.
        modes: the first fills the standard fields.
        details: also origin, rank, entropy and the draft's own logprob.
        as_ids: tokens are written `token_id:<n>`.
    """

    table: TokenTable
    top_k: int
    asked_ids: tuple[int, ...]
    modes: tuple[LogprobMode, ...]
    details: bool
    as_ids: bool

    def name(self, token_id: int) -> str:
        """How a token is written."""
        return f"token_id:{token_id}" if self.as_ids else self.table.text_of(token_id)


class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions, filled entry by entry."""

    def __init__(self, view: LogprobView) -> None:
        self._view = view
        self._tokens: list[str] = []
        self._values: list[list[float | None]] = [[] for _ in view.modes]
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._details: list[dict[str, JSONValue] | None] = []

    def add(self, record: TokenRecord, offset: int) -> None:
        """Append a token that starts at character `offset` of the returned text."""
        view = self._view
        has_value = record.modes[0].logprob is not None or record.origin != "prompt"
        self._tokens.append(view.name(record.token_id))
        self._offsets.append(offset)
        for index, values in enumerate(self._values):
            values.append(finite(mode_of(record, index).logprob) if has_value else None)
        self._tops.append(self._top(record) if has_value else None)
        self._details.append(details_of(record))

    def as_json(self) -> dict[str, JSONValue]:
        """The object; all its lists have one length."""
        shown: dict[str, JSONValue] = {
            "tokens": self._tokens,
            "token_logprobs": self._values[0],
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        return _with_extensions(shown, self._view, self._values, self._details)

    def _top(self, record: TokenRecord) -> dict[str, float]:
        """The k best, the chosen token, the asked ids. Tokens of equal text do not collide."""
        view, mode = self._view, record.modes[0]
        chosen = view.name(record.token_id)
        top: dict[str, float] = {}
        for token_id, value in _alternatives(record, view):
            name = view.name(token_id)
            if token_id != record.token_id and (name == chosen or name in top):
                name = f"token_id:{token_id}"
            top[name] = value
        top.setdefault(chosen, finite(mode.logprob))
        return top


class ChatLogprobs:
    """`choices[].logprobs` of /v1/chat/completions, filled entry by entry."""

    def __init__(self, view: LogprobView) -> None:
        self._view = view
        self._content: list[dict[str, JSONValue]] = []
        self._values: list[list[float | None]] = [[] for _ in view.modes]
        self._details: list[dict[str, JSONValue] | None] = []

    def add(self, record: TokenRecord) -> None:
        """Append a token."""
        for index, values in enumerate(self._values):
            values.append(finite(mode_of(record, index).logprob))
        entry = self._entry(record.token_id, finite(record.modes[0].logprob))
        alternatives = _alternatives(record, self._view)
        entry["top_logprobs"] = [self._entry(token_id, value) for token_id, value in alternatives]
        self._content.append(entry)
        self._details.append(details_of(record))

    def as_json(self) -> dict[str, JSONValue]:
        """The object."""
        shown: dict[str, JSONValue] = {"content": self._content, "refusal": None}
        return _with_extensions(shown, self._view, self._values, self._details)

    def _entry(self, token_id: int, value: float) -> dict[str, JSONValue]:
        view = self._view
        return {
            "token": view.name(token_id),
            "logprob": value,
            "bytes": view.table.byte_list(token_id),
        }


def finite(value: float | None) -> float:
    """A number JSON can hold: -9999.0 for what is below float range or filtered by the mode."""
    if value is None or not value > -3.4e38:
        return BELOW_RANGE
    assert math.isfinite(value), f"a logprob is {value}"
    return value


def mode_of(record: TokenRecord, index: int) -> ModeLogprobs:
    """Logprobs in the mode with this index; prompt entries are raw in every mode."""
    return record.modes[index if index < len(record.modes) else 0]


def details_of(record: TokenRecord) -> dict[str, JSONValue] | None:
    """`token_details` of an output token; nothing is known of how a prompt token was chosen."""
    if record.origin == "prompt":
        return None
    return {
        "origin": record.origin,
        "accepted_position": record.position if record.origin == "draft" else None,
        "rank": record.rank,
        "entropy": record.entropy,
        "draft_logprob": record.draft_logprob,
    }


def prompt_logprobs(
    prompt_ids: Sequence[int], records: Sequence[TokenRecord], top_k: int, table: TokenTable
) -> list[dict[str, JSONValue] | None]:
    """`[null, {"<id>": {logprob, rank, decoded_token}}, ...]`, one entry per prompt token."""
    assert len(records) == len(prompt_ids), f"{len(records)} entries, {len(prompt_ids)} tokens"
    return [None, *(_prompt_entry(record, top_k, table) for record in records[1:])]


def _prompt_entry(record: TokenRecord, top_k: int, table: TokenTable) -> dict[str, JSONValue]:
    mode = record.modes[0]
    entry: dict[str, JSONValue] = {
        str(record.token_id): {
            "logprob": finite(mode.logprob),
            "rank": record.rank,
            "decoded_token": table.text_of(record.token_id),
        }
    }
    for place, token_id in enumerate(mode.top_ids[:top_k]):
        if token_id != record.token_id:
            entry[str(token_id)] = {
                "logprob": finite(mode.top_logprobs[place]),
                "rank": place + 1,
                "decoded_token": table.text_of(token_id),
            }
    return entry


def _alternatives(record: TokenRecord, view: LogprobView) -> list[tuple[int, float]]:
    """The k best, then asked ids that are not among them; (id, logprob)."""
    mode = record.modes[0]
    found = list(zip(mode.top_ids[: view.top_k], mode.top_logprobs[: view.top_k], strict=True))
    if view.asked_ids and mode.asked:
        known = {token_id for token_id, _ in found}
        for token_id, value in zip(view.asked_ids, mode.asked, strict=True):
            if token_id not in known:
                known.add(token_id)
                found.append((token_id, finite(value)))
    return found


def _with_extensions(
    shown: dict[str, JSONValue],
    view: LogprobView,
    values: list[list[float | None]],
    details: list[dict[str, JSONValue] | None],
) -> dict[str, JSONValue]:
    if len(view.modes) > 1:
        others = zip(view.modes[1:], values[1:], strict=True)
        shown["modes"] = {name: {"token_logprobs": mode_values} for name, mode_values in others}
    if view.details:
        shown["token_details"] = details
    return shown
