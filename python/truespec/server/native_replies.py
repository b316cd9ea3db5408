"""Replies and stream chunks of POST /generate.

A cumulative stream repeats everything so far in each chunk. What was rendered is kept as bytes and
joined, never rendered again, so a chunk costs what its own tokens cost plus a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from truespec.core import Finish, ModeLogprobs, TokenRecord
from truespec.tokenizer.acceptance import Acceptance
from truespec.tokenizer.request_state import Piece, RequestState
from truespec.tokenizer.token_table import TokenTable

from .logprobs import JSONValue, mode_of
from .names import name_of

Entry = list[float | int | str | None]


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """What a request asked of its reply.

    Attributes:
        many: the reply is a list, and chunks say which choice they belong to.
        with_text: logprob entries carry the token's text.
        incremental: a stream's chunks carry only what is new.
        num_drafts: drafts per step at most, 0 where the engine does not draft.
        started: `time.monotonic()` at arrival.
    """

    table: TokenTable
    many: bool
    with_text: bool
    incremental: bool
    num_drafts: int
    started: float


class NativeReply:
    """Renders one request, whole or as a stream."""

    def __init__(self, options: NativeOptions, choices: Sequence[RequestState]) -> None:
        self._options = options
        self._choices = [_Choice(options, state) for state in choices]

    def whole(self) -> JSONValue:
        """The reply when every choice is over."""
        replies = [choice.whole() for choice in self._choices]
        return replies if self._options.many else replies[0]

    def chunk(self, index: int, piece: Piece) -> JSONValue:
        """A stream's chunk."""
        chunk = self._choices[index].chunk(piece)
        return {**chunk, "index": index} if self._options.many else chunk


class _Choice:
    """One choice: its output so far as JSON bytes."""

    def __init__(self, options: NativeOptions, state: RequestState) -> None:
        self._options = options
        self._state = state
        self._output = _Output(options, state)
        self._input: dict[str, JSONValue] | None = None
        self._num_tokens = 0
        self._acceptance = Acceptance()

    def whole(self) -> dict[str, JSONValue]:
        state = self._state
        return self.chunk(Piece(state.records, state.offsets, state.text, state.finish))

    def chunk(self, piece: Piece) -> dict[str, JSONValue]:
        """The choice's chunk after these new tokens."""
        is_first = self._input is None
        if self._input is None:
            self._input = self._input_fields()
        self._output.add(piece)
        self._num_tokens += len(piece.records)
        for record in piece.records:
            self._acceptance.add(record)
        shows_input = is_first or not self._options.incremental
        chunk: dict[str, JSONValue] = {
            "text": self._output.text.fragment(),
            "output_ids": self._output.ids.fragment(),
            "meta_info": {
                **self._meta(piece.finish),
                **(self._input if shows_input else {}),
                **self._output.logprob_fields(),
            },
        }
        if self._options.incremental:
            self._output = _Output(self._options, self._state)
        return chunk

    def _meta(self, finish: Finish | None) -> dict[str, JSONValue]:
        state = self._state
        meta: dict[str, JSONValue] = {
            "id": name_of(state.rid),
            "finish_reason": finish_reason(finish, self._num_tokens),
            "prompt_tokens": len(state.submit.prompt_ids),
            "completion_tokens": self._num_tokens,
            "cached_tokens": state.num_cached_tokens,
            "e2e_latency": time.monotonic() - self._options.started,
            "seed": state.submit.params.seed,
        }
        if self._options.num_drafts:
            counts = self._acceptance
            meta |= {
                "spec_verify_ct": counts.num_steps,
                "spec_accept_length": counts.mean_length,
                "spec_accept_rate": counts.rate,
                "spec_num_correct_drafts": counts.num_accepted,
                "spec_num_proposed_drafts": counts.num_drafts,
                "spec_correct_drafts_histogram": counts.padded_histogram(self._options.num_drafts),
                "spec_accept_token_num": counts.num_accepted,
                "spec_draft_token_num": counts.num_drafts,
            }
        return meta

    def _input_fields(self) -> dict[str, JSONValue]:
        asked = self._state.submit.params.logprobs
        if asked is None:
            return {}
        lists = _Entries(self._options, asked.token_ids, asked.prompt_top_k, index=0)
        for record in self._state.prompt_records:
            lists.add(record)
        return lists.fields("input")


class _Output:
    """Output of a choice as JSON bytes: text, ids, and entries in every asked mode."""

    def __init__(self, options: NativeOptions, state: RequestState) -> None:
        asked = state.submit.params.logprobs
        self.text = _GrowingText()
        self.ids = _GrowingArray()
        self._names = asked.modes if asked is not None else ()
        self._modes = [
            _Entries(options, asked.token_ids, asked.top_k, index=index)
            for index in range(len(self._names))
            if asked is not None
        ]

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text.add(piece.text)
        for record in piece.records:
            self.ids.add(record.token_id)
            for entries in self._modes:
                entries.add(record)

    def logprob_fields(self) -> dict[str, JSONValue]:
        """Fields of `meta_info`: the first mode in the standard ones, the others by name."""
        if not self._modes:
            return {}
        fields = self._modes[0].fields("output")
        if len(self._modes) > 1:
            others = zip(self._names[1:], self._modes[1:], strict=True)
            fields["modes"] = {name: entries.fields("output") for name, entries in others}
        return fields


class _Entries:
    """`*_token_logprobs`, `*_top_logprobs` and `*_token_ids_logprobs` of one mode."""

    def __init__(
        self, options: NativeOptions, asked_ids: tuple[int, ...], top_k: int, *, index: int
    ) -> None:
        self._options = options
        self._asked_ids = asked_ids
        self._top_k = top_k
        self._index = index
        self._chosen = _GrowingArray()
        self._tops = _GrowingArray()
        self._asked = _GrowingArray()

    def add(self, record: TokenRecord) -> None:
        """Append a token."""
        mode = mode_of(record, self._index)
        self._chosen.add(self._entry(mode.logprob, record.token_id))
        if self._top_k:
            top_ids, values = mode.top_ids[: self._top_k], mode.top_logprobs[: self._top_k]
            self._tops.add(self._rows(record, mode, top_ids, values))
        if self._asked_ids:
            self._asked.add(self._rows(record, mode, self._asked_ids, mode.asked))

    def fields(self, prefix: str) -> dict[str, JSONValue]:
        """The lists that were asked for."""
        found: dict[str, JSONValue] = {f"{prefix}_token_logprobs": self._chosen.fragment()}
        if self._top_k:
            found[f"{prefix}_top_logprobs"] = self._tops.fragment()
        if self._asked_ids:
            found[f"{prefix}_token_ids_logprobs"] = self._asked.fragment()
        return found

    def _rows(
        self,
        record: TokenRecord,
        mode: ModeLogprobs,
        ids: Sequence[int],
        values: Sequence[float | None],
    ) -> list[Entry] | None:
        """Entries of several ids; `None` before the first prompt token, which nothing precedes."""
        if record.origin == "prompt" and mode.logprob is None:
            return None
        return [self._entry(value, i) for value, i in zip(values, ids, strict=True)]

    def _entry(self, value: float | None, token_id: int) -> Entry:
        text = self._options.table.text_of(token_id) if self._options.with_text else None
        return [value if value is not None and value > -3.4e38 else None, token_id, text]


class _GrowingArray:
    """A JSON array that is rendered as it grows."""

    def __init__(self) -> None:
        self._data = bytearray(b"[")

    def add(self, value: JSONValue) -> None:
        """Append a value."""
        if len(self._data) > 1:
            self._data += b","
        self._data += orjson.dumps(value)

    def fragment(self) -> orjson.Fragment:
        """The array so far."""
        return orjson.Fragment(bytes(self._data) + b"]")


class _GrowingText:
    """A JSON string that is rendered as it grows."""

    def __init__(self) -> None:
        self._data = bytearray(b'"')

    def add(self, text: str) -> None:
        """Append text."""
        self._data += orjson.dumps(text)[1:-1]

    def fragment(self) -> orjson.Fragment:
        """The string so far."""
        return orjson.Fragment(bytes(self._data) + b'"')


def finish_reason(finish: Finish | None, num_tokens: int) -> dict[str, JSONValue] | None:
    """The native form of a finish."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": num_tokens}
    return {"type": "abort", "message": finish.message}
