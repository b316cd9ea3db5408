"""Grammars are read, or refused with the reason, before a request is admitted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from truespec.constrained.grammar import compile_error
from truespec.params import Grammar

GOOD = [
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Grammar("json_schema", '{"$defs": {"n": {"enum": [1, 2]}}, "$ref": "#/$defs/n"}'),
    Grammar("json_object"),
    Grammar("regex", r"(\d{1,3}\.){3}\d{1,3}"),
    Grammar("lark", 'start: "a" word*\nword: /[a-z]+/'),
    Grammar("lark", 'start: "::=" /[a-z]/'),
    Grammar("lark", 'root ::= "yes" | digits\ndigits ::= [0-9]+'),
    Grammar("lark", "start: /[a-z]+/ <|im_end|>"),
    Grammar("choice", json.dumps(["a", "", 'quote"', "back\\slash", "line\nbreak", "é"])),
]
BAD = [
    (Grammar("json_schema", "{"), "double quotes"),
    (Grammar("json_schema", "[]"), "a JSON schema is an object"),
    (Grammar("json_schema", "[" * 100_000), "nested too deeply"),
    (Grammar("json_schema", '{"type": "nothing"}'), "nothing"),
    (Grammar("json_schema", '{"not": {"type": "string"}}'), "not"),
    (Grammar("json_schema", '{"$ref": "#/$defs/missing"}'), "missing"),
    (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "minLength"),
    (Grammar("regex", "(a"), "unclosed group"),
    (Grammar("regex", "(?=a)b"), "look-around"),
    (Grammar("regex", ""), "empty text"),
    (Grammar("lark", "start: missing"), "missing"),
    (Grammar("lark", "start: <|nobody|>"), "<|nobody|>"),
    (Grammar("lark", "root ::= ("), "Expected"),
    (Grammar("choice", "[]"), "non-empty list of strings"),
    (Grammar("choice", "[1]"), "non-empty list of strings"),
    (Grammar("choice", '[""]'), "empty text"),
]


@pytest.mark.parametrize("grammar", GOOD, ids=lambda g: f"{g.kind}:{g.text}")
def test_a_grammar_that_can_be_followed_is_taken(grammar: Grammar) -> None:
    assert compile_error(grammar, [b"<|im_end|>"]) is None


@pytest.mark.parametrize(("grammar", "reason"), BAD, ids=lambda v: getattr(v, "text", v)[:60])
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(
    grammar: Grammar, reason: str
) -> None:
    found = compile_error(grammar, [b"<|im_end|>"])
    assert found is not None
    assert reason in found


def test_the_server_process_reads_grammars_without_torch() -> None:
    code = (
        "import sys, truespec.constrained.matcher as m;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
