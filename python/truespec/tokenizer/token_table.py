"""Bytes and printable text of single tokens, by id, each made once.

Knows the vocabulary; must not know requests. Callers ask millions of times, so results are kept.
"""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """The part of a tokenizer backend that turns ids into bytes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids whose text is hidden unless it is asked for."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of a token; of its text where it is special."""
        ...


class TokenTable:
    """Bytes and text of tokens.

    A model's head may have more rows than the tokenizer has ids; those tokens have no bytes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special_ids = vocabulary.special_ids
        self._vocabulary = vocabulary
        self._num_known = vocabulary.vocab_size
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._byte_lists: dict[int, list[int]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Exact bytes of a token; empty for an id the tokenizer does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            known = token_id < self._num_known
            found = self._vocabulary.token_bytes(token_id) if known else b""
            self._bytes[token_id] = found
        return found

    def byte_list(self, token_id: int) -> list[int]:
        """`bytes_of` as numbers, as JSON wants them. Not to be changed."""
        found = self._byte_lists.get(token_id)
        if found is None:
            found = self._byte_lists[token_id] = list(self.bytes_of(token_id))
        return found

    def text_of(self, token_id: int) -> str:
        r"""Text of a token; a fragment of a character is written like `bytes:\xe2\x80`."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = printable(self.bytes_of(token_id))
        return found


def printable(data: bytes) -> str:
    r"""`data` as text where it is UTF-8, else `bytes:` and every byte as `\xNN`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
