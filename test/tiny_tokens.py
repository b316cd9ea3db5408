"""Text for the 48 token ids of tiny random targets: enough characters and pairs to write JSON."""

from __future__ import annotations

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
_TEXTS = (
    *SPECIAL,
    *'{}[]",:.- ',
    *"0123456789",
    *"abcdefnorstluyw",
    '{"',
    '":',
    '",',
    '"}',
    "true",
    "no",
    "12",
    '"a',
    "ab",
)


class TinyTokens:
    """A tokenizer that spells with the longest token that fits."""

    vocab_size = len(_TEXTS)
    special_ids = frozenset(range(len(SPECIAL)))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return _TEXTS[token_id].encode()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text ; unknown characters are skipped."""
        ids = []
        while text:
            fits = [i for i in range(len(SPECIAL), len(_TEXTS)) if text.startswith(_TEXTS[i])]
            best = max(fits, key=lambda i: len(_TEXTS[i]), default=None)
            ids += [] if best is None else [best]
            text = text[1 if best is None else len(_TEXTS[best]) :]
        return ids

    def text(self, token_ids: list[int]) -> str:
        """The text of ids without special ones."""
        return "".join(_TEXTS[i] for i in token_ids if i not in self.special_ids)


TINY_TOKENS = TinyTokens()
