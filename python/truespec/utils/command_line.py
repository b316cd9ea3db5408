"""Flags from described options: `--some-name` for `some_name`, values from a file below them.

Knows argparse and plain data; the options come from the caller.
"""

from __future__ import annotations

import argparse
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol, Union, get_args, get_origin


class OptionLike(Protocol):
    """What a flag is made from."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> object: ...
    @property
    def default(self) -> object: ...
    @property
    def help(self) -> str: ...


def add_flags(
    parser: argparse.ArgumentParser,
    options: Iterable[OptionLike],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Add a flag per option. A flag that is not given leaves no attribute behind.

    Args:
        aliases: more flags (like "--enable-x") by option name.
    """
    for option in options:
        flags = [f"--{option.name.replace('_', '-')}"]
        if aliases and option.name in aliases:
            flags.append(aliases[option.name])
        text = f"{option.help} (default: {_shown(option.default)})".replace("%", "%%")
        kind = _plain(option.type)
        if kind is bool:
            # What is on already can be turned off; nobody needs a flag to leave it off.
            action = argparse.BooleanOptionalAction if option.default else "store_true"
            parser.add_argument(
                *flags, dest=option.name, action=action, default=argparse.SUPPRESS, help=text
            )
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else None
        parser.add_argument(
            *flags,
            dest=option.name,
            type=_reader(kind),
            choices=choices,
            metavar=None if choices else option.name.rsplit("_", 1)[-1].upper(),
            default=argparse.SUPPRESS,
            help=text,
        )


def read_values(path: str) -> dict[str, object]:
    """Options of a JSON or TOML file; names with dashes or underscores.

    Raises `ValueError` when it is neither, or holds something else than a table.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        data = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is neither JSON (.json) nor TOML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold options by name")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def check_values(values: Mapping[str, object], options: Iterable[OptionLike], source: str) -> None:
    """Raise `ValueError` for a value of the wrong type or an unknown name."""
    known = {option.name: option for option in options}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{source} has {name!r}, which is no option")
        if not _fits(value, known[name].type):
            raise ValueError(f"{source}: {name} is {value!r}, expected {_words(known[name].type)}")


def _plain(kind: object) -> object:
    """The type without `| None`."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(part for part in get_args(kind) if part is not types.NoneType)
    return kind


def _reader(kind: object) -> type[int] | type[float] | type[str]:
    if kind is int:
        return int
    return float if kind is float else str


def _fits(value: object, kind: object) -> bool:
    if value is None:
        return types.NoneType in get_args(kind)
    plain = _plain(kind)
    if get_origin(plain) is Literal:
        return value in get_args(plain)
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is plain


def _words(kind: object) -> str:
    plain = _plain(kind)
    if get_origin(plain) is Literal:
        return "one of " + ", ".join(map(str, get_args(plain)))
    return plain.__name__ if isinstance(plain, type) else str(plain)


def _shown(default: object) -> str:
    return "decided at start" if default is None else str(default)
