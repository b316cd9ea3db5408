"""What is wrong with a tokenizer's files."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer that is broken or of a kind that is not built. The text names it."""
