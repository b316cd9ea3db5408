"""Where a request's output stands in its grammar: which tokens may follow, and whether any may.

Knows tokens, no request, draft or tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from truespec.constrained.grammar import EMPTY, is_empty, matcher_error, to_llguidance
from truespec.constrained.vocabulary import GrammarError, LoadTokens, build_tokenizer
from truespec.params import Grammar


class GrammarBackend:
    """Makes matchers over one vocabulary, which is read when the first grammar arrives.

    Args:
        load_tokens: gives the tokenizer.
        vocab_size: rows of the model's head.
        eos_token_ids: what ends a complete output.
    """

    def __init__(
        self,
        load_tokens: LoadTokens,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._load_tokens = load_tokens
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None

    @property
    def num_mask_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self._vocab_size // 32)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher before the first token. Raises GrammarError."""
        if self._tokenizer is None:
            source = self._load_tokens()
            self._tokenizer = build_tokenizer(source, self._vocab_size, self._eos_token_ids)
        try:
            text = to_llguidance(grammar)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if is_empty(matcher, self._tokenizer.eos_tokens):
            raise GrammarError(EMPTY)
        return Matcher(matcher, self.num_mask_words)


class Matcher:
    """Follows one output through its grammar. What follows is a function of the tokens alone."""

    def __init__(self, matcher: LLMatcher, num_mask_words: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = 4 * num_mask_words
        self._check()

    @property
    def is_complete(self) -> bool:
        """Nothing may follow, or nothing but an end-of-sequence token."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> bytes:
        """The tokens that may follow: little-endian 32-bit words, bit i of word w is 32 w + i.

        Must not be asked of a complete output. Raises GrammarError.
        """
        assert not self.is_complete, "no token follows a complete output"
        words: bytes = self._matcher.compute_bitmask()
        self._check()
        return words[: self._num_mask_bytes]

    def try_advance(self, token_id: int) -> bool:
        """Go on by a token; False, with nothing changed, when the grammar forbids it."""
        if self.is_complete:
            return False
        is_allowed = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_allowed

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count > 0:
            self._matcher.rollback(count)
            self._check()

    def _check(self) -> None:
        problem = matcher_error(self._matcher)
        if problem is not None:
            raise GrammarError(problem)
