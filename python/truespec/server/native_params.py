"""A body of /generate as one item per prompt: scalars are spread, lists are matched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from truespec.params import LogprobMode, LogprobParams
from truespec.tokenizer.errors import BadRequest, Problem

from .native_models import GenerateRequest, NativeSampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NativeItem:
    """One prompt of a /generate request.

    Attributes:
        prompt: text or ids.
        logprobs: `None` when none were asked.
        asked_ids: checked also when no logprobs were asked.
    """

    prompt: str | list[int]
    sampling: NativeSampling
    logprobs: LogprobParams | None
    asked_ids: tuple[int, ...]
    rid: str | None


def native_items(body: GenerateRequest, default_mode: LogprobMode) -> tuple[list[NativeItem], bool]:
    """The prompts of a request, and whether it is a batch. Raises `BadRequest`."""
    prompts, is_batch = _prompts(body)
    count = len(prompts)
    given = body.sampling_params or [NativeSampling()]
    sampling = given * count if len(given) == 1 else _matched("sampling_params", given, count)
    wanted = _spread("return_logprob", body.return_logprob, False, count, is_batch)
    starts = _spread("logprob_start_len", body.logprob_start_len, -1, count, is_batch)
    widths = _spread("top_logprobs_num", body.top_logprobs_num, 0, count, is_batch)
    rids = _rids(body.rid, count, is_batch)
    asked = _asked(body, count, is_batch)
    modes = tuple(body.logprobs_mode or [default_mode])
    items = []
    for index, prompt in enumerate(prompts):
        top_k, ids = widths[index], asked[index]
        logprobs = LogprobParams(top_k, top_k, starts[index], ids, modes)
        items.append(
            NativeItem(
                prompt, sampling[index], logprobs if wanted[index] else None, ids, rids[index]
            )
        )
    if len({item.sampling.n or 1 for item in items}) > 1:
        raise BadRequest([Problem("sampling_params", "n must be the same for the whole batch")])
    return items, is_batch


def _prompts(body: GenerateRequest) -> tuple[list[str | list[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        problem = "exactly one of text and input_ids is needed"
        raise BadRequest([Problem("text", problem)])
    if isinstance(body.text, str):
        return [body.text], False
    given: Sequence[str | list[int] | int] = (
        body.text if body.text is not None else body.input_ids or []
    )
    name = "text" if body.text is not None else "input_ids"
    if not given:
        raise BadRequest([Problem(name, f"{name} is empty")])
    rows = [item for item in given if not isinstance(item, int)]
    if rows:
        return rows, True
    return [[item for item in given if isinstance(item, int)]], False


def _spread(
    name: str, value: T | list[T] | None, default: T, count: int, is_batch: bool
) -> list[T]:
    """One value per prompt."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if not is_batch:
        raise BadRequest([Problem(name, f"{name} is a list, but there is one prompt")])
    return _matched(name, value, count)


def _rids(value: str | list[str] | None, count: int, is_batch: bool) -> list[str | None]:
    if value is None:
        return [None] * count
    if isinstance(value, str):
        return [value] if not is_batch else [f"{value}_{index}" for index in range(count)]
    rids = _spread("rid", value, "", count, is_batch)
    if len(set(rids)) != len(rids):
        raise BadRequest([Problem("rid", "rid names one request twice")])
    return list(rids)


def _asked(body: GenerateRequest, count: int, is_batch: bool) -> list[tuple[int, ...]]:
    value = body.token_ids_logprob or []
    flat = [item for item in value if isinstance(item, int)]
    rows = [tuple(item) for item in value if not isinstance(item, int)]
    if not rows:
        return [tuple(flat)] * count
    if not is_batch:
        problem = "token_ids_logprob is a list of lists, but there is one prompt"
        raise BadRequest([Problem("token_ids_logprob", problem)])
    return _matched("token_ids_logprob", rows, count)


def _matched(name: str, values: list[T], count: int) -> list[T]:
    if len(values) != count:
        raise BadRequest([Problem(name, f"{name} has {len(values)} entries for {count} prompts")])
    return values
