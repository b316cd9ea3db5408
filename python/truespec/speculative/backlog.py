"""What the draft cache lacks: positions that wait to be filled, and pages that never will be.

Knows target rows and pages; knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truespec.core import Req
from truespec.kvcache import KVCache

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FreshRows:
    """Consecutive positions of each request that the draft cache is to be extended by.

    Attributes:
        reqs: bs of them.
        firsts: [bs] first position of each. lengths: [bs] its positions.
        source: [n, W] fp32 what the drafter reads of the target at these positions: the captured
            features, or the final hidden states where it captures nothing.
        emitted: tokens of each request that it does not hold yet.
    """

    reqs: list[Req]
    firsts: list[int]
    lengths: list[int]
    source: Tensor
    emitted: list[list[int]]


class _Part(NamedTuple):
    """Some adjacent rows of what was read."""

    source: Tensor
    first: int
    end: int


@dataclass(slots=True)
class _Waiting:
    """Of a request: where its rows are, for `length` positions from `first` on."""

    first: int
    length: int
    parts: list[_Part]


@dataclass(slots=True)
class Backlog:
    """Target rows of decoding requests, kept until they are needed.

    Attributes:
        cache: tells which pages a request has.
    """

    cache: KVCache
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _has_gap: dict[str, bool] = field(default_factory=dict)
    _is_filled: bytearray = field(default_factory=bytearray)  # by page: no position was left out

    def __post_init__(self) -> None:
        self._is_filled = bytearray(self.cache.num_pages)

    def size(self, req: Req) -> int:
        """Positions that wait."""
        waiting = self._waiting.get(req.rid)
        return 0 if waiting is None else waiting.length

    def hold(self, req: Req, first: int, source: Tensor, row: int, count: int) -> None:
        """Keep `count` rows of `source`, from `row` on, for the positions from `first` on."""
        waiting = self._waiting.get(req.rid)
        if waiting is None:
            self._waiting[req.rid] = waiting = _Waiting(first, 0, [])
        waiting.parts.append(_Part(source, row, row + count))
        waiting.length += count

    def take(self, reqs: list[Req]) -> FreshRows | None:
        """All that waits for some requests; it counts as filled from now on."""
        reqs = [req for req in reqs if req.rid in self._waiting]
        if not reqs:
            return None
        taken = [self._waiting.pop(req.rid) for req in reqs]
        fresh = FreshRows(
            reqs,
            [waiting.first for waiting in taken],
            [waiting.length for waiting in taken],
            _joined([part for waiting in taken for part in waiting.parts]),
            [[] for _ in reqs],
        )
        self.fill(fresh)
        return fresh

    def fill(self, fresh: FreshRows) -> None:
        """These positions get their draft KV."""
        size = self.cache.page_size
        for req, first, length in zip(fresh.reqs, fresh.firsts, fresh.lengths, strict=True):
            # NOTE: a page that is entered in its middle stays what it was.
            for page in req.pages[-(-first // size) : -(-(first + length) // size)]:
                self._is_filled[page] = 1

    def leave_out(self, req: Req, first: int, end: int) -> None:
        """Positions first .. end - 1 never get draft KV, so the request is not drafted for."""
        self._has_gap[req.rid] = True
        size = self.cache.page_size
        for page in req.pages[first // size : -(-end // size)]:
            self._is_filled[page] = 0

    def drop(self, req: Req) -> None:
        """Leave out all that waits."""
        waiting = self._waiting.pop(req.rid, None)
        if waiting is not None:
            self.leave_out(req, waiting.first, waiting.first + waiting.length)

    def has_gap(self, req: Req) -> bool:
        """Some position before those that wait has no draft KV."""
        known = self._has_gap.get(req.rid)
        if known is not None:
            return known
        num_pages = -(-req.num_computed // self.cache.page_size)
        found = not all(self._is_filled[page] for page in req.pages[:num_pages])
        # NOTE: until its first token a request's pages may yet be replaced by cached ones.
        if req.output_ids:
            self._has_gap[req.rid] = found
        return found

    def forget(self, req: Req) -> None:
        """The request left its pages."""
        self._waiting.pop(req.rid, None)
        self._has_gap.pop(req.rid, None)


def _joined(parts: list[_Part]) -> Tensor:
    """The rows of all parts in order; no copy where they are adjacent in one tensor."""
    runs = parts[:1]
    for part in parts[1:]:
        last = runs[-1]
        if part.source is last.source and part.first == last.end:
            runs[-1] = last._replace(end=part.end)
        else:
            runs.append(part)
    slices = [source[first:end] for source, first, end in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices)
