"""A vocabulary for tests: any list of byte strings, some of them special."""

from __future__ import annotations

from collections.abc import Sequence

from truespec.core import TokenRecord
from truespec.tokenizer.token_table import TokenTable


class ByteVocabulary:
    """Token i has the bytes `tokens[i]`."""

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.tokens = list(tokens)
        self.special_ids = special

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def table_of(*tokens: bytes, special: frozenset[int] = frozenset()) -> TokenTable:
    return TokenTable(ByteVocabulary(tokens, special))


def record(token_id: int) -> TokenRecord:
    return TokenRecord(token_id, "target")
