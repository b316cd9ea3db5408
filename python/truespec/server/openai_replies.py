"""Replies and stream chunks of the two /v1 routes, cut from the records of the choices.

Knows the shapes of OpenAI's API; must not know sockets or the engine. A chunk costs what its own
tokens cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from truespec.core import Finish, TokenRecord
from truespec.tokenizer.acceptance import Acceptance
from truespec.tokenizer.request_state import Piece, RequestState
from truespec.tokenizer.token_table import TokenTable

from .logprobs import ChatLogprobs, CompletionLogprobs, JSONValue, LogprobView, prompt_logprobs

Chunk = dict[str, JSONValue]


class Echo(NamedTuple):
    """The echoed prompt: its text, and the character each token starts at."""

    text: str
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What a request asked of its reply.

    Attributes:
        id, created, model: head of every chunk.
        num_choices: per prompt; choices are prompt-major.
        logprobs: `None` when no entries for output tokens were asked.
        prompt_top_k: `prompt_logprobs`.
        echoes: one per prompt, empty without echo.
        num_drafts: drafts per step at most, 0 where the engine does not draft.
    """

    id: str
    created: int
    model: str
    num_choices: int
    logprobs: LogprobView | None
    table: TokenTable
    prompt_top_k: int | None = None
    echoes: tuple[Echo, ...] = ()
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_drafts: int = 0


class OpenAIReply(ABC):
    """Renders one request, whole or as a stream."""

    object_name: str
    chunk_name: str

    def __init__(self, options: ReplyOptions, choices: Sequence[RequestState]) -> None:
        self.options = options
        self.choices = choices
        self._num_sent = [0] * len(choices)
        self._begun = [False] * len(choices)

    def whole(self) -> dict[str, JSONValue]:
        """The reply when every choice is over."""
        reply = self._head(self.object_name)
        reply["choices"] = [self._whole_choice(index) for index in range(len(self.choices))]
        reply["usage"] = self.usage([len(state.records) for state in self.choices])
        return {**reply, **self._metrics(), **self._prompt_root()}

    def opening(self) -> list[Chunk]:
        """Chunks before any token."""
        return []

    def chunk(self, index: int, piece: Piece) -> Chunk:
        """A chunk with new output of a choice."""
        choice = self._chunk_choice(index, piece)
        choice["finish_reason"] = finish_reason(piece.finish)
        choice["stop_reason"] = self._stop_reason(index, piece.finish)
        if piece.finish is not None:
            choice["seed"] = self.choices[index].submit.params.seed
        if self.options.token_ids:
            choice["token_ids"] = [record.token_id for record in piece.records]
        self._num_sent[index] += len(piece.records)
        return self._chunk([choice])

    def begin(self, index: int) -> Chunk | None:
        """A chunk with what precedes a choice's first token, once, if there is anything."""
        if self._begun[index]:
            return None
        self._begun[index] = True
        return self._begin(index)

    def closing(self) -> list[Chunk]:
        """Chunks after the last token: usage, where it was asked for."""
        if not self.options.include_usage:
            return []
        chunk = self._head(self.chunk_name)
        chunk["choices"] = []
        chunk["usage"] = self.usage([len(state.records) for state in self.choices])
        return [{**chunk, **self._metrics()}]

    def usage(self, num_completion_tokens: Sequence[int]) -> dict[str, JSONValue]:
        """`usage` for so many tokens per choice."""
        firsts = self.choices[:: self.options.num_choices]
        num_prompt = sum(len(state.submit.prompt_ids) for state in firsts)
        num_output = sum(num_completion_tokens)
        num_cached = sum(state.num_cached_tokens for state in firsts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    @abstractmethod
    def _whole_choice(self, index: int) -> dict[str, JSONValue]: ...

    @abstractmethod
    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, JSONValue]: ...

    @abstractmethod
    def _begin(self, index: int) -> Chunk | None: ...

    def _prompt_root(self) -> dict[str, JSONValue]:
        """Fields about the prompt at the root of the reply."""
        return {}

    def _head(self, name: str) -> dict[str, JSONValue]:
        options = self.options
        return {
            "id": options.id,
            "object": name,
            "created": options.created,
            "model": options.model,
        }

    def _chunk(self, choices: list[dict[str, JSONValue]]) -> Chunk:
        chunk = self._head(self.chunk_name)
        chunk["choices"] = choices
        if self.options.continuous_usage:
            chunk["usage"] = self.usage(self._num_sent)
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    def _metrics(self) -> dict[str, JSONValue]:
        """`metrics.speculative_decoding`, for a single choice of an engine that drafts."""
        if len(self.choices) != 1 or self.options.num_drafts == 0:
            return {}
        counts = self.choices[0].acceptance
        return {"metrics": {"speculative_decoding": speculation(counts, self.options.num_drafts)}}

    def _finish_fields(self, index: int) -> dict[str, JSONValue]:
        state = self.choices[index]
        fields: dict[str, JSONValue] = {
            "finish_reason": finish_reason(state.finish),
            "stop_reason": self._stop_reason(index, state.finish),
            "seed": state.submit.params.seed,
        }
        if self.options.token_ids:
            fields["token_ids"] = [record.token_id for record in state.records]
        return fields

    def _stop_reason(self, index: int, finish: Finish | None) -> int | str | None:
        """The stop string or asked stop id that matched; `None` for an end-of-sequence id."""
        if finish is None or finish.kind != "stop":
            return None
        asked = self.choices[index].submit.params.stop_token_ids
        return (
            finish.matched if isinstance(finish.matched, str) or finish.matched in asked else None
        )

    def _prompt_fields(self, index: int) -> dict[str, JSONValue]:
        """`prompt_token_ids` and `prompt_logprobs`, where they were asked for."""
        state = self.choices[index]
        prompt_ids = state.submit.prompt_ids
        fields: dict[str, JSONValue] = {}
        if self.options.token_ids:
            fields["prompt_token_ids"] = prompt_ids
        if self.options.prompt_top_k is not None:
            table, top_k = self.options.table, self.options.prompt_top_k
            fields["prompt_logprobs"] = prompt_logprobs(
                prompt_ids, state.prompt_records, top_k, table
            )
        return fields


class CompletionReply(OpenAIReply):
    """POST /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def _whole_choice(self, index: int) -> dict[str, JSONValue]:
        state, echo = self.choices[index], self._echo(index)
        entries = self._echo_entries(index)
        if entries is not None:
            self._add(entries, index, state.records, state.offsets)
        return {
            "index": index,
            "text": (echo.text if echo else "") + state.text,
            "logprobs": entries.as_json() if entries is not None else None,
            **self._finish_fields(index),
            **self._prompt_fields(index),
        }

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, JSONValue]:
        view = self.options.logprobs
        entries = CompletionLogprobs(view) if view is not None and piece.records else None
        if entries is not None:
            self._add(entries, index, piece.records, piece.offsets)
        return {
            "index": index,
            "text": piece.text,
            "logprobs": entries.as_json() if entries is not None else None,
        }

    def _begin(self, index: int) -> Chunk | None:
        echo, fields = self._echo(index), self._prompt_fields(index)
        if echo is None and not fields:
            return None
        entries = self._echo_entries(index) if echo is not None else None
        choice: dict[str, JSONValue] = {
            "index": index,
            "text": echo.text if echo else "",
            "logprobs": entries.as_json() if entries is not None else None,
            "finish_reason": None,
            "stop_reason": None,
            **({"token_ids": []} if self.options.token_ids else {}),
            **fields,
        }
        return self._chunk([choice])

    def _echo(self, index: int) -> Echo | None:
        echoes = self.options.echoes
        return echoes[index // self.options.num_choices] if echoes else None

    def _echo_entries(self, index: int) -> CompletionLogprobs | None:
        """Entries of the echoed prompt, or an empty object without echo."""
        if self.options.logprobs is None:
            return None
        entries, echo = CompletionLogprobs(self.options.logprobs), self._echo(index)
        if echo is not None:
            for record, offset in zip(
                self.choices[index].prompt_records, echo.offsets, strict=True
            ):
                entries.add(record, offset)
        return entries

    def _add(
        self,
        entries: CompletionLogprobs,
        index: int,
        records: Sequence[TokenRecord],
        offsets: Sequence[int],
    ) -> None:
        echo = self._echo(index)
        base = len(echo.text) if echo else 0
        for record, offset in zip(records, offsets, strict=True):
            entries.add(record, base + offset)


class ChatReply(OpenAIReply):
    """POST /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> list[Chunk]:
        """The first chunk of each choice carries the role."""
        return [
            self._chunk([self._delta(index, {"role": "assistant", "content": self._echoed})])
            for index in range(len(self.choices))
        ]

    def _whole_choice(self, index: int) -> dict[str, JSONValue]:
        state = self.choices[index]
        text = self._echoed + state.text
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._entries(state.records),
            **self._finish_fields(index),
        }

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, JSONValue]:
        choice = self._delta(index, {"content": piece.text})
        choice["logprobs"] = self._entries(piece.records) if piece.records else None
        return choice

    def _begin(self, index: int) -> Chunk | None:
        fields = self._prompt_fields(index)
        if index or not fields:
            return None
        return {**self._chunk([self._delta(index, {"content": ""})]), **fields}

    def _prompt_root(self) -> dict[str, JSONValue]:
        return self._prompt_fields(0)

    @property
    def _echoed(self) -> str:
        return self.options.echoes[0].text if self.options.echoes else ""

    def _entries(self, records: Sequence[TokenRecord]) -> dict[str, JSONValue] | None:
        if self.options.logprobs is None:
            return None
        entries = ChatLogprobs(self.options.logprobs)
        for record in records:
            entries.add(record)
        return entries.as_json()

    def _delta(self, index: int, delta: dict[str, JSONValue]) -> dict[str, JSONValue]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def finish_reason(finish: Finish | None) -> str | None:
    """OpenAI's word for a finish; an error is reported as an error, not by this word."""
    return finish.kind if finish is not None else None


def speculation(counts: Acceptance, num_drafts: int) -> dict[str, JSONValue]:
    """`metrics.speculative_decoding`: counts over kept tokens."""
    return {
        "mean_acceptance_length": counts.mean_length,
        "draft_acceptance_rate": counts.rate,
        "acceptance_histogram": counts.padded_histogram(num_drafts),
        "num_spec_steps": counts.num_steps,
        "num_accepted_draft_tokens": counts.num_accepted,
        "num_draft_tokens": counts.num_drafts,
        "num_spec_tokens": counts.num_tokens,
    }
