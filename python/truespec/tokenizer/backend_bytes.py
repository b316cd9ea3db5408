"""The exact bytes that a token stands for, from its spelling in the vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer

from .backend_error import TokenizerError

SPACE = "\u2581"  # how sentencepiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>$")


def spelling_decoder(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """The function from a token's spelling to its bytes, by the tokenizer's decoder.

    Raises:
        TokenizerError: the decoder is neither byte-level nor sentencepiece with byte fallback.
    """
    parts = _decoder_parts(tokenizer)
    if "ByteLevel" in parts:
        return byte_level_bytes
    if "ByteFallback" in parts or "Metaspace" in parts:
        return sentencepiece_bytes
    raise TokenizerError(
        f"the tokenizer's decoder is {' + '.join(parts) or 'missing'}, expected ByteLevel, or "
        "Metaspace or ByteFallback"
    )


def byte_level_bytes(spelling: str) -> bytes:
    """Bytes of a byte-level spelling; characters outside the alphabet stand for themselves."""
    return b"".join(
        bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode() for char in spelling
    )


def sentencepiece_bytes(spelling: str) -> bytes:
    """Bytes of a sentencepiece spelling: `<0xNN>` is a byte, U+2581 a space."""
    byte = _BYTE_TOKEN.match(spelling)
    return bytes([int(byte[1], 16)]) if byte else spelling.replace(SPACE, " ").encode()


def _decoder_parts(tokenizer: Tokenizer) -> list[str]:
    """Types of the decoder's parts, in order."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest is moved above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(moved)
    }


_BYTE_OF = _byte_alphabet()
