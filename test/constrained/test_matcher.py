"""Masks against brute force over strings, and masks that depend on the tokens alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable

import pytest

from tiny_tokens import EOS_ID, SPECIAL, TINY_TOKENS, TinyTokens
from truespec.constrained.matcher import GrammarBackend, Matcher
from truespec.constrained.vocabulary import GrammarError, no_tokens
from truespec.params import Grammar

HEAD = 50  # rows of the head: three more than the tokenizer has ids
WORDS = ["no", "not", "nobody"]
SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "maxLength": 4},
        "n": {"type": "integer"},
        "t": {"type": "array", "items": {"enum": ["no", "true"]}, "maxItems": 2},
    },
    "required": ["ab", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", r"(\d{1,2}\.){2}[ab]*"),
    "choice": Grammar("choice", json.dumps(WORDS)),
    "gbnf": Grammar("lark", 'root ::= "[" item ("," item)* "]"\nitem ::= [1-9] [0-9]* | "true"'),
}


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return GrammarBackend(lambda: TINY_TOKENS, HEAD, (EOS_ID,))


def allowed(matcher: Matcher) -> list[int]:
    mask = int.from_bytes(matcher.mask(), "little")
    return [i for i in range(64) if mask >> i & 1]


def follow(matcher: Matcher, token_ids: Iterable[int]) -> Matcher:
    for token_id in token_ids:
        assert matcher.try_advance(token_id)
    return matcher


def test_a_mask_covers_the_head_in_whole_words(backend: GrammarBackend) -> None:
    assert backend.num_mask_words == 2
    assert len(backend.matcher(GRAMMARS["object"]).mask()) == 8


def starts_a_word(text: str) -> bool:
    return any(word.startswith(text) for word in WORDS)


def starts_an_address(text: str) -> bool:
    patterns = (r"\d{0,2}", r"\d{1,2}\.\d{0,2}", r"\d{1,2}\.\d{1,2}\.[ab]*")
    return any(re.fullmatch(pattern, text) for pattern in patterns)


@pytest.mark.parametrize(
    ("name", "starts", "is_whole"),
    [
        ("choice", starts_a_word, WORDS.__contains__),
        ("regex", starts_an_address, re.compile(r"(\d{1,2}\.){2}[ab]*").fullmatch),
    ],
)
def test_the_mask_allows_exactly_what_brute_force_finds(
    backend: GrammarBackend,
    name: str,
    starts: Callable[[str], bool],
    is_whole: Callable[[str], object],
) -> None:
    rng = random.Random(0)
    for _ in range(20):
        matcher, path = backend.matcher(GRAMMARS[name]), []
        while not matcher.is_complete and len(path) < 12:
            text = TINY_TOKENS.text(path)
            texts = {i: TINY_TOKENS.text([i]) for i in range(3, TINY_TOKENS.vocab_size)}
            wanted = {i for i, piece in texts.items() if starts(text + piece)}
            found = set(allowed(matcher))
            # Text that is forced anyway may be restricted to the tokenizer's own spelling.
            assert found - {EOS_ID} <= wanted, text
            assert {TINY_TOKENS.text([i])[0] for i in found - {EOS_ID}} == {
                texts[i][0] for i in wanted
            }, text
            assert (EOS_ID in found) == bool(is_whole(text)), text
            path.append(rng.choice(sorted(found)))
            assert matcher.try_advance(path[-1])
        if path[-1] != EOS_ID and matcher.is_complete:
            assert is_whole(TINY_TOKENS.text(path))


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_is_a_function_of_the_tokens_alone(backend: GrammarBackend, name: str) -> None:
    """Neither masks asked before nor drafts taken back leave a trace: verification relies on it."""
    rng = random.Random(1)
    for _ in range(12):
        matcher, path = backend.matcher(GRAMMARS[name]), []
        for _ in range(25):
            if matcher.is_complete:
                break
            mask = matcher.mask()
            assert follow(backend.matcher(GRAMMARS[name]), path).mask() == mask
            for _ in range(3):
                depth = 0
                while depth < 4 and not matcher.is_complete:
                    assert matcher.try_advance(rng.choice(allowed(matcher)))
                    depth += 1
                matcher.rollback(depth)
            forbidden = sorted(set(range(HEAD)) - set(allowed(matcher)))
            assert not matcher.try_advance(rng.choice(forbidden))
            assert matcher.mask() == mask
            path.append(rng.choice(allowed(matcher)))
            assert matcher.try_advance(path[-1])
        assert path


@pytest.mark.parametrize("name", ["schema", "object", "gbnf"])
def test_what_is_complete_is_valid_json(backend: GrammarBackend, name: str) -> None:
    rng, num_complete = random.Random(2), 0
    for _ in range(40):
        matcher, path = backend.matcher(GRAMMARS[name]), []
        for _ in range(80):
            choices = allowed(matcher)
            closing = [i for i in choices if TINY_TOKENS.text([i])[-1:] in ('"', "}", "]")]
            path.append(rng.choice(closing if closing and len(path) > 12 else choices))
            assert matcher.try_advance(path[-1])
            if matcher.is_complete:
                break
        if matcher.is_complete:
            num_complete += 1
            value = json.loads(TINY_TOKENS.text(path))
            assert isinstance(value, list if name == "gbnf" else dict)
            assert name != "schema" or isinstance(value["n"], int)
    assert num_complete > 20


def test_a_complete_output_takes_no_token_until_one_is_taken_back(backend: GrammarBackend) -> None:
    matcher = follow(backend.matcher(Grammar("regex", "ab")), TINY_TOKENS.encode("ab", False))
    assert matcher.is_complete
    assert not matcher.try_advance(EOS_ID)
    matcher.rollback(1)
    assert not matcher.is_complete
    assert matcher.mask()


def test_an_end_that_is_optional_is_offered_and_ends(backend: GrammarBackend) -> None:
    matcher = follow(backend.matcher(Grammar("regex", "a+")), TINY_TOKENS.encode("a", False))
    assert not matcher.is_complete
    assert EOS_ID in allowed(matcher)
    assert matcher.try_advance(EOS_ID)
    assert matcher.is_complete


def test_special_tokens_are_allowed_by_name_only(backend: GrammarBackend) -> None:
    assert allowed(backend.matcher(Grammar("lark", f"start: {SPECIAL[1]}"))) == [1]
    assert 1 not in allowed(backend.matcher(Grammar("regex", r"[<a][|b].*")))


def test_every_end_of_sequence_id_is_offered() -> None:
    matcher = GrammarBackend(lambda: TINY_TOKENS, HEAD, (EOS_ID, 0)).matcher(Grammar("regex", "a+"))
    assert {0, EOS_ID} <= set(allowed(follow(matcher, TINY_TOKENS.encode("a", False))))


def test_a_model_without_end_of_sequence_id_can_follow_grammars() -> None:
    matcher = GrammarBackend(lambda: TINY_TOKENS, HEAD, ()).matcher(Grammar("regex", "a+b"))
    assert max(allowed(follow(matcher, TINY_TOKENS.encode("a", False)))) < HEAD
    assert follow(matcher, TINY_TOKENS.encode("b", False)).is_complete


class BlankFirst(TinyTokens):
    """Like sentencepiece, which puts a blank before a text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return super().encode(" " + text, add_special_tokens)


def test_a_tokenizer_that_adds_a_blank_spells_forced_text_all_the_same() -> None:
    matcher = GrammarBackend(BlankFirst, HEAD, (EOS_ID,)).matcher(Grammar("regex", "true[0-9]"))
    token_ids = []
    while not matcher.is_complete:
        token_ids.append(allowed(matcher)[0])
        assert matcher.try_advance(token_ids[-1])
    assert TINY_TOKENS.text(token_ids) == "true0"


def test_the_tokenizer_is_read_when_the_first_grammar_arrives() -> None:
    loads = []

    def load() -> TinyTokens:
        loads.append(1)
        return TINY_TOKENS

    backend = GrammarBackend(load, HEAD, (EOS_ID,))
    assert loads == []
    backend.matcher(GRAMMARS["object"])
    backend.matcher(GRAMMARS["choice"])
    assert loads == [1]


def test_text_that_no_token_spells_is_an_error_and_not_skipped(backend: GrammarBackend) -> None:
    with pytest.raises(GrammarError, match="no token of the vocabulary begins with") as error:
        backend.matcher(Grammar("regex", "z[0-9]")).mask()
    assert "backtrace" not in str(error.value)


def test_a_grammar_that_cannot_be_followed_raises_with_the_reason(backend: GrammarBackend) -> None:
    with pytest.raises(GrammarError, match="missing"):
        backend.matcher(Grammar("lark", "start: missing"))
    with pytest.raises(GrammarError, match="no tokenizer"):
        GrammarBackend(no_tokens, HEAD, (EOS_ID,)).matcher(GRAMMARS["object"])
