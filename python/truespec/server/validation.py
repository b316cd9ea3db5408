"""From a request's bytes to a checked model: strict JSON, every bad field listed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from truespec.tokenizer.errors import BadRequest, Problem

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=BaseModel)
Unsupported = Mapping[str, Sequence[object]]
_SHOWN_CHARS = 60
_MAX_WARNINGS = 1000
_warned: set[str] = set()


class Problems:
    """Collects what is wrong with a request over several checks, to report it all at once.

    Attributes:
        found: in the order of the checks.
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, param: str, message: str) -> None:
        """Note a bad field."""
        self.found.append(Problem(param, message))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Note a `BadRequest` of the block instead of raising it."""
        try:
            yield
        except BadRequest as error:
            self.found.extend(error.problems)

    def raise_any(self) -> None:
        """Raise `BadRequest` if anything was found."""
        if self.found:
            raise BadRequest(self.found)


class StandIn(NamedTuple):
    """Fields to check the rest of a body with when it has no usable one of `names`."""

    names: tuple[str, ...]
    fields: dict[str, object]


class Parsed(NamedTuple, Generic[Model]):
    """A model made of the good fields of a body, and what is wrong with the others."""

    body: Model
    problems: Problems


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object. Raises `BadRequest` for anything else, NaN and Infinity included."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest([Problem("body", f"the body is not valid JSON: {error}")]) from error
    if not isinstance(data, dict):
        raise BadRequest([Problem("body", "the body must be a JSON object")])
    return data


def parse(model: type[Model], data: Mapping[str, object], stand_in: StandIn) -> Parsed[Model]:
    """Check data against a model; further checks can go on with the good fields.

    Raises `BadRequest` when too little is left.
    """
    problems = Problems()
    try:
        return Parsed(model.model_validate(data), problems)
    except ValidationError as error:
        problems.found.extend(_problems(error))
        rest = _without_bad(data, error)
    if not any(name in rest for name in stand_in.names):
        rest |= stand_in.fields
    try:
        return Parsed(model.model_validate(rest), problems)
    except ValidationError as error:
        raise BadRequest(problems.found) from error


def validate(model: type[Model], body: bytes) -> Model:
    """Check a body that has no further checks. Raises `BadRequest` with every bad field."""
    try:
        return model.model_validate(parse_object(body))
    except ValidationError as error:
        raise BadRequest(_problems(error)) from error


def check_extra(request: BaseModel, unsupported: Unsupported, problems: Problems) -> None:
    """Note fields that are known but not built, unless their value asks for nothing.

    `unsupported` maps a field to the values that are harmless beside `None`.
    """
    extra = request.model_extra or {}
    for name, harmless in unsupported.items():
        value = extra.get(name)
        if value is not None and value not in harmless:
            problems.add(name, f"{name} is not supported by this server")


def warn_unknown(request: BaseModel, known: Unsupported) -> None:
    """Log each unknown field once in the life of the process."""
    for name in (request.model_extra or {}).keys() - known.keys() - _warned:
        if len(_warned) < _MAX_WARNINGS:  # NOTE: clients choose the names; the set stays bounded
            _warned.add(name)
            log.warning("unknown field %r is ignored (said once)", name[:_SHOWN_CHARS])


def _problems(error: ValidationError) -> list[Problem]:
    """One problem per bad field; a union's several complaints about one value become one."""
    by_field: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        shown = _shown(item["input"]) if item["type"] != "missing" else "nothing"
        text = item["msg"].removeprefix("Value error, ")
        by_field.setdefault(_field(item["loc"]), []).append(f"{text} (got {shown})")
    return [Problem(name, f"{name}: {' or: '.join(found)}") for name, found in by_field.items()]


def _field(path: Sequence[int | str]) -> str:
    """The field a complaint is about: the first name, or the last within sampling_params."""
    names = [part for part in path if isinstance(part, str)] or ["body"]
    return names[-1] if names[0] == "sampling_params" else names[0]


def _without_bad(data: Mapping[str, object], error: ValidationError) -> dict[str, object]:
    """A copy of `data` without the values that the error complains about."""
    rest = copy.deepcopy(dict(data))
    for item in error.errors(include_url=False, include_context=False):
        holder: dict[str, object] = rest
        name = str(item["loc"][0])
        for part in item["loc"][1:]:
            inner = holder.get(name)
            if isinstance(inner, dict) and part in inner:
                holder, name = inner, str(part)
        holder.pop(name, None)
    return rest


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
