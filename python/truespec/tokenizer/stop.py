"""Finds stop strings and stop expressions in text that arrives piece by piece.

Knows characters only. The cost of a piece depends on its own length, not on the text before it.
"""

from __future__ import annotations

import re
from re import _parser as sre_parser  # type: ignore[attr-defined]  # not in the type stubs
from typing import NamedTuple

MAX_REGEX_CHARS = 512


class Match(NamedTuple):
    """A stop that was found: characters start .. end - 1 of the whole text."""

    start: int
    end: int
    stop: str


class StopMatcher:
    """Looks for stops in a growing text.

    A stop string matches at the first character that completes one, the longest where several end
    there. Expressions are tried after each piece, leftmost match first. So the result depends on
    the pieces (tokens) alone, not on how many arrive together.

    Attributes:
        num_held: characters at the end of the text that may still become part of a match.
    """

    def __init__(self, stop: tuple[str, ...], stop_regex: tuple[str, ...]) -> None:
        self._strings = [_StringStop(text) for text in stop]
        self._regexes = [_RegexStop(pattern) for pattern in stop_regex]
        self._num_chars = 0
        self.num_held = 0

    def feed(self, text: str) -> Match | None:
        """Take the next piece of text; a match ends the use of this object."""
        found = [match for match in (self._feed_strings(text), self._feed_regexes(text)) if match]
        self._num_chars += len(text)
        held = [stop.num_matched for stop in self._strings] + [r.num_held for r in self._regexes]
        self.num_held = max(held, default=0)
        return min(found, default=None)

    def _feed_strings(self, text: str) -> Match | None:
        if not self._strings:
            return None
        for end, char in enumerate(text, self._num_chars + 1):
            done = [stop.text for stop in self._strings if stop.step(char)]
            if done:
                longest = max(done, key=len)
                return Match(end - len(longest), end, longest)
        return None

    def _feed_regexes(self, text: str) -> Match | None:
        found = [stop.feed(text, self._num_chars) for stop in self._regexes]
        return min((match for match in found if match), default=None)


def regex_width(pattern: str) -> int:
    """Characters the longest match of a stop expression can have.

    Raises `ValueError` when it does not compile, looks ahead, can match nothing, or has no bound up
    to `MAX_REGEX_CHARS`: text that may become part of a match has to be held back.
    """
    try:
        shortest, longest = sre_parser.parse(pattern).getwidth()
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if "(?=" in pattern or "(?!" in pattern:
        raise ValueError(f"{pattern!r} looks ahead, at text that is not there yet")
    if shortest == 0:
        raise ValueError(f"{pattern!r} matches the empty text, so it would stop at once")
    if longest > MAX_REGEX_CHARS:
        raise ValueError(
            f"{pattern!r} can match more than {MAX_REGEX_CHARS} characters; "
            "give its repeats an upper bound, like {1,20}"
        )
    return int(longest)


class _StringStop:
    """One stop string, matched character by character (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def step(self, char: str) -> bool:
        """Take one character; True when it completes the string."""
        matched = self.num_matched
        while matched and self.text[matched] != char:
            matched = self._borders[matched]
        if self.text[matched] == char:
            matched += 1
        self.num_matched = matched
        return matched == len(self.text)


class _RegexStop:
    """One expression of bounded width, searched in the last characters only."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._source = pattern
        self._width = regex_width(pattern)
        self._tail = ""
        self.num_held = 0

    def feed(self, text: str, num_before: int) -> Match | None:
        """Take the next piece of text, which `num_before` characters precede."""
        first = max(0, len(self._tail) - self._width + 1)
        tail = self._tail + text
        found = self._pattern.search(tail, first)
        self.num_held = min(num_before + len(text), self._width - 1)
        # NOTE: one character more than a match needs, so that \b and ^ see what precedes it, and
        # the search never starts at the beginning of a shortened tail.
        self._tail = tail[-2 * MAX_REGEX_CHARS :]
        if found is None:
            return None
        shift = num_before + len(text) - len(tail)
        return Match(found.start() + shift, found.end() + shift, self._source)


def _borders(text: str) -> list[int]:
    """[len + 1]: length of the longest proper prefix of text[:i] that is also its suffix."""
    borders = [0, 0]
    matched = 0
    for char in text[1:]:
        while matched and text[matched] != char:
            matched = borders[matched]
        if text[matched] == char:
            matched += 1
        borders.append(matched)
    return borders
