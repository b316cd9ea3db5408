"""A tokenizer's vocabulary as llguidance wants it. Knows bytes of tokens, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

_END = b"<|end of output|>"
END_ID = 256  # of it in `special_tokenizer`


class TokenSource(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text: a grammar allows them by name only."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of a token; of its text where it is special."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`."""
        ...


LoadTokens = Callable[[], TokenSource]


def special_texts(source: TokenSource) -> list[bytes]:
    """What a Lark grammar may name: the texts of all special tokens."""
    return [source.token_bytes(i) for i in sorted(source.special_ids)]


class GrammarError(ValueError):
    """A grammar cannot be compiled, or not be followed any further."""


def no_tokens() -> TokenSource:
    """Of an engine that works on token ids alone. Raises GrammarError."""
    raise GrammarError("this engine has no tokenizer, without which no grammar can be followed")


class _Spelling:
    """The object that `TokenizerWrapper` reads: tokens, special ids, and text to ids."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_ids: Sequence[int], eos: int, source: TokenSource | None
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos
        self._source = source
        special = set(special_ids)
        self._ids = {text: i for i, text in enumerate(tokens) if text and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Ids that spell `data` exactly.

        llguidance restricts forced text to these tokens: bytes that differ would skip text.
        """
        if self._source is not None:
            ids = self._source.encode(data.decode("utf-8", errors="ignore"), False)
            # NOTE: sentencepiece tokenizers put a blank before a text.
            if b"".join(self._source.token_bytes(i) for i in ids) == data:
                return ids
        return self._spell(data)

    def _spell(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                raise ValueError(f"no token of the vocabulary begins with {data[at : at + 1]!r}")
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


def build_tokenizer(
    source: TokenSource, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """llguidance's tokenizer over the rows of a model's head.

    Args:
        vocab_size: rows of the head; ids the tokenizer does not know are never allowed.
        eos_token_ids: what may follow a complete output.
    """
    known = min(vocab_size, source.vocab_size)
    tokens = [source.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
    special = [i for i in source.special_ids if i < vocab_size]
    eos = list(eos_token_ids)
    if not eos:  # an id that no row of the head has: such a model ends at limits only
        tokens.append(_END)
        special.append(vocab_size)
        eos = [vocab_size]
    wrapper = TokenizerWrapper(_Spelling(tokens, special, eos[0], source))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=eos)


def special_tokenizer(special_tokens: Sequence[bytes]) -> LLTokenizer:
    """The bytes and some special tokens: enough to compile a grammar that names them."""
    tokens = [bytes([byte]) for byte in range(END_ID)] + [_END, *special_tokens]
    special = list(range(END_ID, len(tokens)))
    wrapper = TokenizerWrapper(_Spelling(tokens, special, END_ID, None))
    return LLTokenizer(wrapper, n_vocab=len(tokens))
