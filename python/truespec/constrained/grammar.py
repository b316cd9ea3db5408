"""Grammars of requests in llguidance's language, and why one cannot be used. Knows no tokenizer."""

from __future__ import annotations

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from truespec.params import Grammar


def to_llguidance(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it. Raises `ValueError` when its text cannot be read."""
    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict | bool):
                raise ValueError("a JSON schema is an object")
            return str(LLMatcher.grammar_from_json_schema(grammar.text))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_alternatives(grammar.text)))
        case "lark":
            # GBNF ("root ::= ...") is what other servers call EBNF; Lark has no such sign.
            is_gbnf = "::=" in grammar.text
            text = gbnf_to_lark(grammar.text) if is_gbnf else grammar.text
            return str(LLMatcher.grammar_from_lark(text))


def compile_error(grammar: Grammar) -> str | None:
    """Why the grammar cannot be used, `None` if it can."""
    try:
        found = LLMatcher.validate_grammar(to_llguidance(grammar))
    except (ValueError, GbnfToLarkError) as error:
        return str(error)
    return str(found).strip() or None


def _alternatives(text: str) -> str:
    """A Lark rule that matches one of the strings of a JSON list."""
    choices = json.loads(text)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise ValueError("choice is a non-empty list of strings")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
