"""Pages of running requests: prefix hits, growth, release. The scheduler's view of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from truespec.core import Req
from truespec.kvcache.pages import PageAllocator
from truespec.kvcache.prefix import Node, PrefixCache


class Placed(NamedTuple):
    """Rows in order, request by request, and where they lie in the pool.

    Attributes:
        positions: [n]. row_to_req: [n] row of `KVCache.page_table`. slots: [n] of each position.
    """

    positions: NDArray[np.int32]
    row_to_req: NDArray[np.int32]
    slots: NDArray[np.int64]


class KVCache:
    """Gives pages to requests and keeps the page table the kernels read.

    Args:
        num_pages: pages of the pool.
        page_size: tokens per page.
        max_rows: requests that can run at once.
        max_tokens: tokens a request can reach, drafts included.
        lookahead: see `PrefixCache`.
        enable_prefix: reuse pages between requests.

    Attributes:
        page_table: [max_rows, max pages per request] int32, row = `Req.row`.
        shared_table: the same memory for kernels, which read it only.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_tokens: int,
        lookahead: int,
        enable_prefix: bool,
    ) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.prefix = PrefixCache(
            self.allocator, page_size=page_size, lookahead=lookahead, enabled=enable_prefix
        )
        self.page_table: NDArray[np.int32] = np.zeros(
            (max_rows, -(-max_tokens // page_size)), dtype=np.int32
        )
        self.shared_table = torch.from_numpy(self.page_table)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._nodes: dict[int, Node] = {}

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted at once."""
        return self.allocator.num_free + self.prefix.num_idle_pages

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be admitted."""
        return len(self._free_rows)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def try_admit(self, req: Req, *, max_hit: int, num_tokens: int) -> bool:
        """Give a waiting request a row, the pages of its cached prefix and room for `num_tokens`.

        Args:
            max_hit: longest useful prefix hit, in tokens.
            num_tokens: positions the request must have room for.

        Returns False, with nothing taken, when pages or rows do not suffice.
        """
        if not self._free_rows:
            return False
        node, pages = self.prefix.match(req.token_ids, max_hit)
        self.prefix.lock(node)
        missing = max(0, self.pages_for(num_tokens) - len(pages))
        if missing > self.num_available:
            self.prefix.unlock(node)
            return False
        req.row = self._free_rows.pop()
        req.pages = pages
        req.num_shared_pages = len(pages)
        req.num_computed = len(pages) * self.page_size
        self._nodes[req.row] = node
        self._append(req, missing, start=0)
        return True

    def try_grow(self, req: Req, num_tokens: int) -> bool:
        """Make room for `num_tokens` positions; False, with nothing taken, when pages are short."""
        missing = self.pages_for(num_tokens) - len(req.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        self._append(req, missing, start=len(req.pages))
        return True

    def share(self, req: Req, num_valid: int) -> None:
        """Put the full pages of a running request's first `num_valid` tokens into the cache."""
        node, kept = self.prefix.insert(req.token_ids, req.pages, num_valid)
        if len(kept) <= req.num_shared_pages:
            return
        self.prefix.lock(node)
        self.prefix.unlock(self._nodes[req.row])
        self._nodes[req.row] = node
        req.pages[: len(kept)] = kept
        self.page_table[req.row, : len(kept)] = kept
        req.num_shared_pages = len(kept)

    def release(self, req: Req, *, keep: bool) -> None:
        """Take row and pages from a request; `keep` leaves its full pages in the prefix cache."""
        if keep:
            self.share(req, min(req.num_computed, req.num_tokens))
        self.prefix.unlock(self._nodes.pop(req.row))
        self.allocator.free(req.pages[req.num_shared_pages :])
        self._free_rows.append(req.row)
        req.row, req.pages, req.num_shared_pages, req.num_computed = -1, [], 0, 0

    def place(self, reqs: list[Req], firsts: list[int], counts: list[int]) -> Placed:
        """Rows for `counts[i]` positions of each running request from `firsts[i]` on.

        Pages for them are reserved.
        """
        positions: list[int] = []
        row_to_req: list[int] = []
        slots: list[int] = []
        for req, first, count in zip(reqs, firsts, counts, strict=True):
            end = first + count
            positions += range(first, end)
            row_to_req += [req.row] * count
            for page in range(first // self.page_size, self.pages_for(end) if count else 0):
                begin, stop = page * self.page_size, (page + 1) * self.page_size
                shift = req.pages[page] * self.page_size - begin
                slots += range(max(first, begin) + shift, min(end, stop) + shift)
        return Placed(
            positions=np.array(positions, np.int32),
            row_to_req=np.array(row_to_req, np.int32),
            slots=np.array(slots, np.int64),
        )

    def flush(self) -> int:
        """Evict every idle page of the prefix cache; returns how many."""
        return self.prefix.evict(self.prefix.num_pages)

    def check_idle(self) -> None:
        """Assert that with no running request every page and row is accounted for."""
        held = self.allocator.num_free + self.prefix.num_pages
        assert held == self.num_pages, f"{self.num_pages - held} pages are lost"
        assert self.prefix.num_idle_pages == self.prefix.num_pages, "a cached page is still locked"
        assert len(self._free_rows) == self.page_table.shape[0], "a row is lost"

    def _append(self, req: Req, count: int, *, start: int) -> None:
        short = count - self.allocator.num_free
        if short > 0:
            self.prefix.evict(short)
        req.pages = req.pages + self.allocator.alloc(count)
        self.page_table[req.row, start : len(req.pages)] = req.pages[start:]
