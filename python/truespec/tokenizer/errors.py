"""A request that its sender has to change. Knows nothing of HTTP; the server makes a 400 of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Problem(NamedTuple):
    """One bad field: its name as the sender wrote it, and what would be right."""

    param: str
    message: str


class BadRequest(ValueError):
    """One or more bad fields, all of them, in the order they were found.

    Attributes:
        problems: at least one.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a BadRequest names at least one problem"
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.message for problem in self.problems))

    @property
    def param(self) -> str:
        """The first bad field."""
        return self.problems[0].param
