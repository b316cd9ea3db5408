"""The output side of one request: from records to text, stops and pieces that may be sent.

Knows one request. Does no input or output and reads no clock; the manager feeds it. Each record
costs the same, however many came before.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import NamedTuple

from truespec.core import Finish, TokenRecord, cut
from truespec.message import Output, Submit

from .acceptance import Acceptance
from .stop import Match, StopMatcher
from .token_table import TokenTable


class Piece(NamedTuple):
    """Output that may be sent: whole tokens with whole characters, and nothing that a stop may cut.

    Attributes:
        records: one token, or several where one character spans them.
        offsets: characters of output text before each token.
        text: the text of these tokens.
        finish: set on the last piece of a request, exactly once.
    """

    records: list[TokenRecord]
    offsets: list[int]
    text: str
    finish: Finish | None


class RequestState:
    """What is known of a running request's output.

    Attributes:
        submit: the request as it was sent.
        records: kept tokens, released or held back; final once `finish` is set.
        offsets: characters of output text before each of `records`.
        prompt_records: scored prompt entries from `logprobs.start` on.
        num_cached_tokens: prompt tokens found in the prefix cache.
        acceptance: counts over `records`.
        finish: why the request ended.
    """

    def __init__(self, submit: Submit, table: TokenTable, *, pending: bytes = b"") -> None:
        """`pending`: an unfinished character at the end of an echoed prompt."""
        params = submit.params
        self.submit = submit
        self.records: list[TokenRecord] = []
        self.offsets: list[int] = []
        self.prompt_records: list[TokenRecord] = []
        self.num_cached_tokens = 0
        self.acceptance = Acceptance()
        self.finish: Finish | None = None
        self._table = table
        self._text = TextStream(table, skip_special_tokens=params.skip_special_tokens)
        self._text.push_bytes(pending)
        has_stops = bool(params.stop or params.stop_regex)
        self._stops = StopMatcher(params.stop, params.stop_regex) if has_stops else None
        self._held: deque[_Unit] = deque()
        self._open = _Unit()
        self._texts: list[str] = []

    @property
    def rid(self) -> str:
        """Name of the request."""
        return self.submit.rid

    @property
    def text(self) -> str:
        """All released text."""
        return "".join(self._texts)

    def feed(self, output: Output) -> list[Piece]:
        """Take what the engine committed; return the pieces that may be sent now.

        After the piece with `finish` the request is over; if `output.finish` is `None` then, a
        stop matched and the engine has to be told to end the request.
        """
        assert self.finish is None, f"output for {self.rid}, which ended with {self.finish}"
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.prompt_records.extend(output.prompt_records)
        hidden = self._hidden_index(output)
        for index, record in enumerate(output.records):
            match = self._add(record, hidden=index == hidden)
            if match:
                kept = cut(output.records, index + 1, Finish("stop", match.stop))
                return self._end(kept.finish, cut_at=self._cut_position(match))
        if output.finish:
            return self._end(output.finish, cut_at=None)
        return self._release()

    def fail(self, finish: Finish) -> list[Piece]:
        """End the request without the engine; what is held back is released."""
        return self._end(finish, cut_at=None)

    def _hidden_index(self, output: Output) -> int:
        """Index of the record that is a stop token, whose text is not shown; -1 for none."""
        finish = output.finish
        shows = self.submit.params.include_stop
        if shows or finish is None or finish.kind != "stop" or not output.records:
            return -1
        last = len(output.records) - 1
        return last if output.records[last].token_id == finish.matched else -1

    def _add(self, record: TokenRecord, *, hidden: bool) -> Match | None:
        offset = self._text.num_chars
        text = "" if hidden else self._text.push(record.token_id)
        self.records.append(record)
        self.offsets.append(offset)
        self.acceptance.add(record)
        self._open.add(record, offset, text)
        if not self._text.has_pending:
            self._close_unit()
        return self._stops.feed(text) if self._stops and text else None

    def _close_unit(self) -> None:
        self._open.end = self._text.num_chars
        self._held.append(self._open)
        self._open = _Unit()

    def _cut_position(self, match: Match) -> int:
        return match.end if self.submit.params.include_stop else match.start

    def _release(self) -> list[Piece]:
        num_held = self._stops.num_held if self._stops else 0
        safe = self._text.num_chars - num_held
        pieces = []
        while self._held and self._held[0].end <= safe:
            pieces.append(self._piece(self._held.popleft(), None))
        return pieces

    def _end(self, finish: Finish | None, *, cut_at: int | None) -> list[Piece]:
        """Release everything; text from `cut_at` on is dropped."""
        assert finish is not None
        self.finish = finish
        self._open.text += self._text.flush()
        if self._open.records or self._open.text:
            self._close_unit()
        end = self._text.num_chars if cut_at is None else cut_at
        units = [self._trim(unit, end) for unit in self._held] or [_Unit()]
        self._held.clear()
        self.offsets = [min(o, end) for o in self.offsets] if cut_at is not None else self.offsets
        pieces = [self._piece(unit, None) for unit in units[:-1]]
        return [*pieces, self._piece(units[-1], finish)]

    def _trim(self, unit: _Unit, end: int) -> _Unit:
        start = unit.end - len(unit.text)
        kept = unit.text[: max(0, end - start)]
        return _Unit(unit.records, [min(o, end) for o in unit.offsets], kept, min(unit.end, end))

    def _piece(self, unit: _Unit, finish: Finish | None) -> Piece:
        self._texts.append(unit.text)
        return Piece(unit.records, unit.offsets, unit.text, finish)


class TextStream:
    """Characters from tokens. A character appears with the token that completes it.

    Attributes:
        num_chars: characters so far.
    """

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self.num_chars = 0
        self._table = table
        self._hidden = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def has_pending(self) -> bool:
        """True in the middle of a character."""
        return bool(self.pending)

    @property
    def pending(self) -> bytes:
        """Bytes of the unfinished character."""
        return self._decoder.getstate()[0]

    def push(self, token_id: int) -> str:
        """Characters that this token completes."""
        return "" if token_id in self._hidden else self.push_bytes(self._table.bytes_of(token_id))

    def push_bytes(self, data: bytes) -> str:
        """Characters that these bytes complete."""
        text = self._decoder.decode(data)
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        """U+FFFD for an unfinished character, else nothing."""
        text = self._decoder.decode(b"", True)
        self.num_chars += len(text)
        return text


class _Unit:
    """Tokens that can only be sent together, because one character spans them."""

    __slots__ = ("end", "offsets", "records", "text")

    def __init__(
        self,
        records: list[TokenRecord] | None = None,
        offsets: list[int] | None = None,
        text: str = "",
        end: int = 0,
    ) -> None:
        self.records = records if records is not None else []
        self.offsets = offsets if offsets is not None else []
        self.text = text
        self.end = end

    def add(self, record: TokenRecord, offset: int, text: str) -> None:
        """Append one token."""
        self.records.append(record)
        self.offsets.append(offset)
        self.text += text
