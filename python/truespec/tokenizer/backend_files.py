"""Reading the tokenizer of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from .backend_error import TokenizerError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerParts(NamedTuple):
    """What a backend is made of.

    Attributes:
        tokenizer: the library's object, special tokens registered.
        special_tokens: text of "bos_token", "eos_token", ... as far as they exist.
        chat_template: Jinja source or `None`.
    """

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def read_directory(directory: Path) -> TokenizerParts:
    """The tokenizer in `directory`.

    Raises:
        TokenizerError: tokenizer.json is missing or unreadable.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise TokenizerError(f"{path} is missing (other tokenizer files are not built)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json"))
    special_tokens |= _special_tokens(config)
    return TokenizerParts(tokenizer, special_tokens, _chat_template(directory, config))


def _read_json(path: Path) -> dict[str, object]:
    """The object in an optional file; empty where there is none."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds {type(value).__name__}, expected an object")
    return value


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Texts of the special tokens, which are strings or objects with a "content"."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _chat_template(directory: Path, config: dict[str, object]) -> str | None:
    """The template, from the newest of the places that have held it."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    stored = _read_json(directory / "chat_template.json").get("chat_template")
    stored = config.get("chat_template") if stored is None else stored
    if isinstance(stored, list):
        named = {item.get("name"): item.get("template") for item in stored}
        stored = named.get("default")
    if stored is not None and not isinstance(stored, str):
        raise TokenizerError(f"{directory}: chat_template is {type(stored).__name__}, not text")
    return stored
