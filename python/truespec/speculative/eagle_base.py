"""What workers share whose draft KV at position i is built from tokens after i.

Knows which rows of a step can fill draft KV and with which tokens; knows no way of drafting.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from truespec.batch import ModelOutput, ReqChunk
from truespec.core import Req
from truespec.kernels.api import AttentionRows
from truespec.models.drafters.recurrent import RecurrentDrafter
from truespec.speculative.backlog import FreshRows, Ints
from truespec.speculative.base import EngineParts, WorkerPlan
from truespec.speculative.contract import Draft
from truespec.speculative.drafter_worker import DrafterWorker, Drafting


class Carried(NamedTuple):
    """Hidden states of a request's last positions, kept between steps.

    Attributes:
        end: the position after the last of them.
        hidden: [m, H] fp32.
    """

    end: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """Rows in order, request by request, with all tokens that are known.

    Attributes:
        reqs: bs of them.
        row_to_req: [n] index into `reqs`. positions: [n].
        hidden: [n, H] fp32 what the drafter reads at these positions.
        tokens: per request, its known tokens from its first row's position on.
        firsts: [bs] position of each first known token in `tokens`.
    """

    reqs: list[Req]
    row_to_req: Ints
    positions: Ints
    hidden: Tensor
    tokens: list[list[int]]
    firsts: Ints

    def known(self, ahead: int) -> Ints:
        """Rows whose token `ahead` positions later is known, ascending."""
        ends = self.firsts + np.array([len(ids) for ids in self.tokens])
        return np.flatnonzero(self.positions + ahead < ends[self.row_to_req])

    def token_ids(self, rows: Ints, ahead: int) -> Tensor:
        """[len(rows)] int64 tokens `ahead` positions after the rows."""
        flat = np.fromiter((i for ids in self.tokens for i in ids), dtype=np.int64)
        lengths = np.array([len(ids) for ids in self.tokens])
        offsets = np.cumsum(lengths) - lengths - self.firsts
        return torch.from_numpy(flat[offsets[self.row_to_req[rows]] + self.positions[rows] + ahead])

    def last_rows(self, rows: Ints) -> dict[str, int]:
        """Place in `rows` of each request's last one, by request id."""
        return {self.reqs[req].rid: place for place, req in enumerate(self.row_to_req[rows])}


class EagleBase(DrafterWorker):
    """Carries hidden states of the last positions from step to step, by request."""

    options = frozenset({"speculative_num_steps", "speculative_num_draft_tokens"})

    def __init__(self, parts: EngineParts, plan: WorkerPlan, target_ids: Tensor | None) -> None:
        super().__init__(parts, plan, target_ids)
        self.carried: dict[str, Carried] = {}

    @abstractmethod
    def drafts_from_carried(self, drafting: Drafting) -> Draft:
        """As `make_drafts`, with a draft cache that is complete and states up to the roots."""

    def make_drafts(self, drafting: Drafting) -> Draft:
        if drafting.fresh is not None:
            self.extend_rows(drafting.fresh)
        return self.drafts_from_carried(drafting)

    def forget(self, req: Req) -> None:
        super().forget(req)
        self.carried.pop(req.rid, None)

    def carried_of(self, chunk: ReqChunk) -> Tensor:
        """[m, H] states of the positions before a decoding chunk's root."""
        kept = self.carried[chunk.req.rid]
        assert kept.end == chunk.start, f"states up to {kept.end}, the root is at {chunk.start}"
        return kept.hidden

    def window(self, fresh: FreshRows, hidden: Tensor, num_before: int) -> Window:
        """Fresh rows, behind up to `num_before` carried ones of each request.

        Args:
            hidden: [n, H] of the fresh rows.
        """
        parts, starts, tokens = [], [], []
        own_rows = torch.split(hidden, fresh.lengths)
        made = zip(fresh.reqs, fresh.firsts, own_rows, fresh.emitted, strict=True)
        for req, first, own, ids in made:
            before = self._before(req, first, num_before)
            parts += [before, own] if before is not None else [own]
            starts.append(first - (0 if before is None else len(before)))
            tokens.append(known_from(req, starts[-1]) + ids)
        lengths = np.array(fresh.firsts) - np.array(starts) + np.array(fresh.lengths)
        return make_window(fresh.reqs, np.array(starts), lengths, torch.cat(parts), tokens)

    def causal_rows(self, reqs: list[Req], firsts: list[int], counts: list[int]) -> AttentionRows:
        """`counts[i]` rows of each request from position `firsts[i]` on, seeing all before them."""
        placed = self.cache.place(reqs, firsts, counts)
        return AttentionRows(
            positions=torch.from_numpy(placed.positions),
            row_to_req=torch.from_numpy(placed.row_to_req),
            out_slots=torch.from_numpy(placed.slots),
            page_table=self.cache.shared_table,
            kv_lens=torch.from_numpy(placed.positions + 1),
        )

    def window_rows(self, window: Window, rows: Ints) -> AttentionRows:
        """The first rows of each request of a window: `rows` of `known`."""
        counts = np.bincount(window.row_to_req[rows], minlength=len(window.reqs))
        return self.causal_rows(window.reqs, window.firsts.tolist(), counts.tolist())

    def _before(self, req: Req, end: int, count: int) -> Tensor | None:
        """Carried states that end where the fresh rows begin; none right after a prefix hit."""
        kept = self.carried.get(req.rid)
        if count == 0 or kept is None or kept.end != end:
            return None
        return kept.hidden[-count:]


def make_window(
    reqs: list[Req], firsts: Ints, lengths: Ints, hidden: Tensor, tokens: list[list[int]]
) -> Window:
    """A window of `lengths` rows per request, from positions `firsts` on."""
    row_to_req = np.repeat(np.arange(len(reqs)), lengths)
    offsets = np.arange(len(row_to_req)) - (np.cumsum(lengths) - lengths)[row_to_req]
    return Window(reqs, row_to_req, firsts[row_to_req] + offsets, hidden, tokens, firsts)


def known_from(req: Req, first: int) -> list[int]:
    """Known tokens from position `first` on, a new list."""
    num_prompt = len(req.prompt_ids)
    return req.prompt_ids[first:] + req.output_ids[max(0, first - num_prompt) :]


def read(drafter: RecurrentDrafter, fresh: FreshRows) -> Tensor:
    """[n, H] what a drafter makes of the target's states at the fresh rows."""
    output = ModelOutput(hidden=fresh.source, features=fresh.source if drafter.capture else None)
    return drafter.inputs(output, torch.arange(len(fresh.source)))
