"""Grammars of requests in llguidance's language, and why one cannot be used.

Knows no model and no request. The server asks here before it admits a request, so nothing heavy is
imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from truespec.constrained.vocabulary import END_ID, special_tokenizer
from truespec.params import Grammar

# A model that likes blanks must not fill its whole answer with them. A schema's own "x-guidance"
# wins over this.
_BLANKS = r"[ \t\r\n]{1,16}"
EMPTY = "the grammar allows nothing but an empty text"
# As in JavaScript, which JSON schemas follow: digits of forty scripts are no telephone number.
_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def to_llguidance(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it. Raises ValueError when its text cannot be read."""
    match grammar.kind:
        case "json_schema":
            schema = _read_json(grammar.text)
            if not isinstance(schema, dict | bool):
                raise ValueError("a JSON schema is an object")
            return _from_schema(grammar.text)
        case "json_object":
            return _from_schema('{"type": "object"}')
        case "regex":
            return str(LLMatcher.grammar_from_regex(_with_ascii_classes(grammar.text)))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_alternatives(grammar.text)))
        case "lark":
            return str(LLMatcher.grammar_from_lark(_to_lark(grammar.text)))


def compile_error(grammar: Grammar, special_tokens: Sequence[bytes] = ()) -> str | None:
    """Why the grammar cannot be used, `None` if it can.

    Args:
        special_tokens: texts of the special tokens that a Lark grammar may name, like `<|im_end|>`.
    """
    try:
        text = to_llguidance(grammar)
    except ValueError as error:
        return str(error)
    tokenizer = special_tokenizer(special_tokens)
    matcher = LLMatcher(tokenizer, text, log_level=0)
    return matcher_error(matcher) or (EMPTY if is_empty(matcher, [END_ID]) else None)


def matcher_error(matcher: LLMatcher) -> str | None:
    """Why a matcher came to its end, `None` if it did not; without llguidance's inner state."""
    if not matcher.is_error():
        return None
    return re.split(r"<state>|<backtrace>|, traceback:", matcher.get_error())[0].strip()


def is_empty(matcher: LLMatcher, eos_token_ids: Sequence[int]) -> bool:
    """True when a matcher at its start allows nothing but the end."""
    if not matcher.is_accepting():
        return False
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return mask & ~sum(1 << i for i in set(eos_token_ids)) == 0


def _read_json(text: str) -> object:
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return value


def _from_schema(schema: str) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _BLANKS}))


def _with_ascii_classes(regex: str) -> str:
    return re.sub(r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), regex)


def _to_lark(text: str) -> str:
    """Lark as it is; GBNF ("root ::= ..."), which other servers call EBNF, converted."""
    if _GBNF_RULE.search(text) is None:
        return text
    try:
        return str(gbnf_to_lark(text))
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from error


def _alternatives(text: str) -> str:
    """A Lark rule that matches one of the strings of a JSON list."""
    choices = _read_json(text)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise ValueError("choice is a non-empty list of strings")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
