"""Text, stops and pieces of one request, against a naive oracle that sees the whole output."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from byte_vocabulary import record, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from truespec.core import Finish
from truespec.message import Output, Submit
from truespec.params import SamplingParams
from truespec.tokenizer.request_state import Piece, RequestState
from truespec.tokenizer.token_table import TokenTable

LENGTH = Finish("length")


def start(table: TokenTable, params: SamplingParams | None = None) -> RequestState:
    return RequestState(Submit("r", [0], params or SamplingParams()), table)


def feed_steps(
    state: RequestState, ids: list[int], sizes: list[int], finish: Finish = LENGTH
) -> list[Piece]:
    """Feed `ids` in steps of the given sizes (the rest in a last one) until the state ends."""
    bounds = [0]
    for size in sizes:
        bounds.append(min(bounds[-1] + size, len(ids)))
    bounds.append(len(ids))
    pieces: list[Piece] = []
    for begin, end in pairwise(bounds):
        last = finish if (begin, end) == (bounds[-2], bounds[-1]) else None
        pieces += state.feed(Output("r", [record(i) for i in ids[begin:end]], last))
        if state.finish:
            break
    return pieces


def splits(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(bounds)]


TEXT = st.text(st.sampled_from("ab é€😀\n"), min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 200), max_size=40)
SIZES = st.lists(st.integers(0, 5), max_size=30)


@given(TEXT, CUTS, SIZES)
@settings(max_examples=200, deadline=None)
def test_joined_pieces_are_the_whole_text_and_every_token_once(
    text: str, cuts: list[int], sizes: list[int]
) -> None:
    tokens = splits(text.encode(), cuts)
    state = start(table_of(*tokens))
    pieces = feed_steps(state, list(range(len(tokens))), sizes)
    assert "".join(p.text for p in pieces) == text == state.text
    assert [r for p in pieces for r in p.records] == state.records
    assert [r.token_id for r in state.records] == list(range(len(tokens)))
    assert [o for p in pieces for o in p.offsets] == state.offsets
    assert [p.finish for p in pieces] == [None] * (len(pieces) - 1) + [LENGTH]
    complete = [len(b"".join(tokens[:i]).decode("utf-8", "ignore")) for i in range(len(tokens))]
    assert state.offsets == complete


@given(st.binary(min_size=1, max_size=20), CUTS, SIZES)
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_not_utf8_give_the_text_of_the_whole(
    data: bytes, cuts: list[int], sizes: list[int]
) -> None:
    tokens = splits(data, cuts)
    state = start(table_of(*tokens))
    pieces = feed_steps(state, list(range(len(tokens))), sizes)
    assert "".join(p.text for p in pieces) == data.decode("utf-8", "replace")


def naive_stop(tokens: list[bytes], stops: list[str]) -> tuple[int, int, str] | None:
    """(kept tokens, text length, stop): the match that ends first, the longest of those."""
    whole = b"".join(tokens).decode("utf-8", "replace")
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(whole))
        if whole.startswith(stop, start)
    ]
    if not found:
        return None
    end, begin, stop = min(found)
    for count in range(1, len(tokens) + 1):
        if len(b"".join(tokens[:count]).decode("utf-8", "ignore")) >= end:
            return count, begin, stop
    raise AssertionError("a match ends inside the text")


@given(
    TEXT,
    CUTS,
    SIZES,
    st.lists(st.text(st.sampled_from("ab é€"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_cut_like_a_search_in_the_whole_text(
    text: str, cuts: list[int], sizes: list[int], stops: list[str], include_stop: bool
) -> None:
    tokens = splits(text.encode(), cuts)
    params = SamplingParams(stop=tuple(stops), include_stop=include_stop)
    state = start(table_of(*tokens), params)
    pieces = feed_steps(state, list(range(len(tokens))), sizes)
    expected = naive_stop(tokens, stops)
    if expected is None:
        assert (state.text, state.finish, len(state.records)) == (text, LENGTH, len(tokens))
    else:
        count, begin, stop = expected
        shown = text[: begin + len(stop)] if include_stop else text[:begin]
        assert (state.text, state.finish) == (shown, Finish("stop", stop))
        assert len(state.records) == count
    assert "".join(p.text for p in pieces) == state.text
    assert [r for p in pieces for r in p.records] == state.records
    assert [o for p in pieces for o in p.offsets] == state.offsets
    assert max(state.offsets) <= len(state.text)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [5], [2, 3]])
def test_b09_stop_string_inside_accepted_draft_trims_text_and_records(sizes: list[int]) -> None:
    table = table_of(b"ha", b" ha", b" x", b" y")
    state = start(table, SamplingParams(stop=(" ha ha",)))
    pieces = feed_steps(state, [0, 1, 1, 2, 3], sizes)
    assert state.text == "".join(p.text for p in pieces) == "ha"
    assert [r.token_id for r in state.records] == [0, 1, 1]
    assert state.finish == Finish("stop", " ha ha")
    assert pieces[-1].finish == state.finish


def test_a_possible_stop_prefix_is_held_with_its_record_until_it_is_decided() -> None:
    state = start(table_of(b"a", b"b", b"c"), SamplingParams(stop=("abc",)))
    assert state.feed(Output("r", [record(0)])) == []
    assert state.feed(Output("r", [record(1)])) == []
    released = state.feed(Output("r", [record(1)]))
    assert [p.text for p in released] == ["a", "b", "b"]
    assert [[r.token_id for r in p.records] for p in released] == [[0], [1], [1]]


def test_a_character_of_three_tokens_is_one_piece_with_three_records() -> None:
    state = start(table_of(b"\xe2", b"\x82", b"\xac", b"!"))
    assert state.feed(Output("r", [record(0), record(1)])) == []
    pieces = state.feed(Output("r", [record(2), record(3)], LENGTH))
    assert [(p.text, len(p.records), p.offsets) for p in pieces] == [
        ("€", 3, [0, 0, 0]),
        ("!", 1, [1]),
    ]


def test_an_unfinished_character_is_flushed_with_its_records_at_the_end() -> None:
    state = start(table_of(b"a", b"\xe2\x82"))
    assert [p.text for p in state.feed(Output("r", [record(0), record(1)]))] == ["a"]
    assert [p.text for p in state.feed(Output("r", [], LENGTH))] == ["�"]
    assert len(state.records) == 2


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "ab")])
def test_text_of_a_stop_token_is_hidden_unless_asked_but_its_record_stays(
    include_stop: bool, text: str
) -> None:
    state = start(table_of(b"a", b"b"), SamplingParams(include_stop=include_stop))
    state.feed(Output("r", [record(0), record(1)], Finish("stop", 1)))
    assert state.text == text
    assert [r.token_id for r in state.records] == [0, 1]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<s>b")])
def test_special_tokens_have_no_text_unless_asked(skip: bool, text: str) -> None:
    table = table_of(b"a", b"<s>", b"b", special=frozenset([1]))
    state = start(table, SamplingParams(skip_special_tokens=skip))
    state.feed(Output("r", [record(0), record(1), record(2)], LENGTH))
    assert state.text == text


def test_the_rest_of_a_prompts_character_is_completed_by_the_output() -> None:
    table = table_of(b"\x82\xac")
    state = RequestState(Submit("r", [0], SamplingParams()), table, pending=b"\xe2")
    state.feed(Output("r", [record(0)], LENGTH))
    assert state.text == "€"


@given(st.text(st.sampled_from("ab1 2"), min_size=1, max_size=40), CUTS, SIZES)
@settings(max_examples=200, deadline=None)
def test_stop_regex_cuts_where_it_first_matches_after_a_token(
    text: str, cuts: list[int], sizes: list[int]
) -> None:
    pattern = r"\b\d{1,2} a|bb[ab]"
    tokens = splits(text.encode(), cuts)
    state = start(table_of(*tokens), SamplingParams(stop_regex=(pattern,)))
    pieces = feed_steps(state, list(range(len(tokens))), sizes)
    count, shown = len(tokens), text
    for n in range(1, len(tokens) + 1):
        found = re.search(pattern, b"".join(tokens[:n]).decode())
        if found:
            count, shown = n, text[: found.start()]
            break
    assert (state.text, len(state.records)) == (shown, count)
    assert "".join(p.text for p in pieces) == shown


def test_stop_regex_finds_a_match_far_into_a_long_text() -> None:
    table = table_of(b"xy ", b"END", b"!")
    state = start(table, SamplingParams(stop_regex=("END.",)))
    pieces = feed_steps(state, [0] * 1000 + [1, 2, 0], [1] * 1002)
    assert state.text == "".join(p.text for p in pieces) == "xy " * 1000
    assert state.finish == Finish("stop", "END.")


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """X09 by counting: characters that the stop matcher and the decoder look at per token."""
    state = start(table_of(b"abcd"), SamplingParams(stop=("zz", "abce"), stop_regex=("q{1,9}",)))
    sizes = []
    for _ in range(2000):
        state.feed(Output("r", [record(0)]))
        held = sum(len(unit.text) for unit in state._held)
        regex_tail = len(state._stops._regexes[0]._tail) if state._stops else 0
        sizes.append(held + regex_tail)
    assert sizes[-1] <= max(sizes[:400])
