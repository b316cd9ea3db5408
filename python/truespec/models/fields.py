"""Typed access to JSON objects of a checkpoint, with errors that name file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that is broken, or needs something that is not built. The text names it."""


class Fields:
    """A JSON object with typed getters; a field that is `null` counts as absent."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        """Wrap `values`; `source` names the file in errors."""
        self._values = values
        self.source = source

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The object in a JSON file.

        Raises:
            CheckpointError: there is no such file, or it holds no JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds {type(values).__name__}, expected an object")
        return cls(values, path.name)

    @property
    def values(self) -> Mapping[str, object]:
        """The object itself; not to be changed."""
        return self._values

    def get(self, name: str) -> object:
        """The value as it is, `None` where absent."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """The field is there, be it null."""
        return name in self._values

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            CheckpointError: absent without a default, or not a whole number.
        """
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number; errors as `integer`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; errors as `integer`."""
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; empty where absent."""
        value = self.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise self.error(name, "a token id or a list of them")
        return tuple(values)

    def nested(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.source}: {name}")

    def error(self, name: str, expected: str) -> CheckpointError:
        """The error for a field with a wrong value."""
        found = f"is {self.get(name)!r}" if name in self._values else "is missing"
        return CheckpointError(f"{self.source}: {name} {found}, expected {expected}")

    def _present(self, name: str, default: object) -> object:
        value = self.get(name)
        return default if value is None else value
