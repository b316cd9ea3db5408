"""From a request's bytes to a checked model: strict JSON, every bad field listed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from truespec.tokenizer.errors import BadRequest, Problem

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=BaseModel)
_SHOWN_CHARS = 60
_warned: set[str] = set()


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object. Raises `BadRequest` for anything else, NaN and Infinity included."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest([Problem("body", f"the body is not valid JSON: {error}")]) from error
    if not isinstance(data, dict):
        raise BadRequest([Problem("body", "the body must be a JSON object")])
    return data


def validate(model: type[Model], body: bytes) -> Model:
    """Check a body against a model. Raises `BadRequest` with every bad field."""
    return validate_data(model, parse_object(body))


def validate_data(model: type[Model], data: Mapping[str, object]) -> Model:
    """Like `validate`, for data that was parsed already."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadRequest(_problems(error)) from error


def refuse_unsupported(request: BaseModel, unsupported: Mapping[str, Sequence[object]]) -> None:
    """Refuse fields that are known but not built, unless their value asks for nothing.

    `unsupported` maps a field to the values that are harmless beside `None`.
    """
    extra = request.model_extra or {}
    bad = [
        Problem(name, f"{name} is not supported by this server")
        for name, harmless in unsupported.items()
        if extra.get(name) is not None and extra[name] not in harmless
    ]
    if bad:
        raise BadRequest(bad)


def warn_unknown(request: BaseModel, known: Mapping[str, Sequence[object]]) -> None:
    """Log each unknown field once in the life of the process."""
    for name in (request.model_extra or {}).keys() - known.keys() - _warned:
        if len(_warned) < 1000:  # NOTE: clients choose these names; the set must not grow for ever
            _warned.add(name)
            log.warning("unknown field %r is ignored (said once)", name[:_SHOWN_CHARS])


def _problems(error: ValidationError) -> list[Problem]:
    """One problem per bad field; a union's several complaints about one value become one."""
    by_field: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        path = [str(part) for part in item["loc"]] or ["body"]
        shown = _shown(item["input"]) if item["type"] != "missing" else "nothing"
        text = item["msg"].removeprefix("Value error, ")
        by_field.setdefault(path[0], []).append(f"{text} (got {shown})")
    return [Problem(name, f"{name}: {' or: '.join(found)}") for name, found in by_field.items()]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
