"""Chooses the ragged batch of a step: decodes first, then prompt chunks, then new requests.

Reserves the pages of every row. When pages run out the youngest request is retracted: it gives its
pages back, keeps its output, and is prefilled again later (to the same bits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from truespec.batch import Batch, ReqChunk
from truespec.core import Req
from truespec.kvcache import KVCache


@dataclass(slots=True)
class Policy:
    """Waiting and running requests, and the rule that picks among them.

    Attributes:
        cache: gives pages.
        max_prefill_rows: prompt rows per step at most.
        num_draft_slots: slots beyond the last known token a decoding request may write.
        max_request_tokens: tokens a request can reach.
        settle: see `Worker.settle`; called before pages are left to the prefix cache.
        waiting: not admitted, in order of (priority, arrival); retracted ones keep their place.
        running: admitted, in order of admission.
        num_retractions: since start.
    """

    cache: KVCache
    max_prefill_rows: int
    num_draft_slots: int
    max_request_tokens: int
    settle: Callable[[Req], None]
    waiting: list[Req] = field(default_factory=list)
    running: list[Req] = field(default_factory=list)
    num_retractions: int = 0

    def enqueue(self, req: Req) -> None:
        """Put a request where its priority (higher first) and arrival place it."""
        rank = (-req.priority, req.arrival)
        at = len(self.waiting)
        while at > 0 and rank < (-self.waiting[at - 1].priority, self.waiting[at - 1].arrival):
            at -= 1
        self.waiting.insert(at, req)

    def next_batch(self) -> tuple[Batch, list[Req]]:
        """The chunks of the next step (empty when nothing can run) and who was retracted."""
        retracted: list[Req] = []
        chunks: list[ReqChunk] = []
        for req in list(self.running):
            if req.row >= 0 and not req.is_prefilling and not self._is_scoring(req):
                chunk = self._try_decode(req, retracted)
                if chunk is not None:
                    chunks.append(chunk)
        chunks = [chunk for chunk in chunks if chunk.req.row >= 0]
        budget = self.max_prefill_rows
        for req in self.running:
            if budget > 0 and (req.is_prefilling or self._is_scoring(req)):
                chunks.append(self._prefill_chunk(req, budget))
                budget -= chunks[-1].num_rows
        while budget > 0 and self.waiting and not retracted:
            if not self._try_admit(self.waiting[0]):
                break
            req = self.waiting.pop(0)
            self.running.append(req)
            chunks.append(self._prefill_chunk(req, budget))
            budget -= chunks[-1].num_rows
        return Batch(chunks), retracted

    def remove(self, req: Req, *, keep: bool) -> None:
        """Take a request out, wherever it is; `keep` leaves its pages to the prefix cache."""
        if req.row >= 0:
            self.running.remove(req)
            self._release(req, keep=keep)
        else:
            self.waiting.remove(req)

    def _try_decode(self, req: Req, retracted: list[Req]) -> ReqChunk | None:
        drafts = self._max_drafts(req)
        while not self.cache.try_grow(
            req, req.num_tokens + (self.num_draft_slots if drafts else 0)
        ):
            if drafts > 0:
                drafts = 0
                continue
            victim = self._victim()
            self._retract(victim)
            retracted.append(victim)
            if victim is req:
                return None
        return ReqChunk(req, start=req.num_computed, num_rows=1, samples=True, max_drafts=drafts)

    def _max_drafts(self, req: Req) -> int:
        if not req.params.speculative:
            return 0
        left = min(
            req.params.max_tokens - len(req.output_ids), self.max_request_tokens - req.num_tokens
        )
        return max(0, min(self.num_draft_slots, left - 1))

    def _victim(self) -> Req:
        return max(self.running, key=lambda req: (-req.priority, req.arrival))

    def _release(self, req: Req, *, keep: bool) -> None:
        if keep and self.cache.prefix.enabled:
            self.settle(req)
        self.cache.release(req, keep=keep)

    def _retract(self, req: Req) -> None:
        self.running.remove(req)
        self._release(req, keep=True)
        self.enqueue(req)
        self.num_retractions += 1

    @staticmethod
    def _is_scoring(req: Req) -> bool:
        """A request without output that only wants its prompt scored ends with its prefill."""
        return req.params.max_tokens == 0

    def _prefill_chunk(self, req: Req, budget: int) -> ReqChunk:
        left = req.num_tokens - req.num_computed
        rows = min(left, budget)
        samples = rows == left and not self._is_scoring(req)
        return ReqChunk(req, req.num_computed, num_rows=rows, samples=samples, max_drafts=0)

    def _try_admit(self, req: Req) -> bool:
        max_hit = req.num_tokens - 1
        if req.next_scored is not None:  # the row before an entry's token has to be computed
            max_hit = min(max_hit, max(0, req.next_scored - 1))
        if self._is_being_computed(req, max_hit, self.running):
            return False
        # NOTE: with the last running request gone every page can be evicted, so waiting ends.
        return self.cache.try_admit(req, max_hit=max_hit, num_tokens=req.num_tokens)

    def _is_being_computed(self, req: Req, max_hit: int, others: Iterable[Req]) -> bool:
        """Another request prefills a page that this one could share once it is done."""
        size = self.cache.page_size
        ids = req.token_ids
        found = len(self.cache.prefix.match(ids, max_hit)[1])
        end = (found + 1) * size
        if not self.cache.prefix.enabled or end > max_hit:
            return False
        return any(
            other.is_prefilling and other.num_tokens >= end and other.token_ids[:end] == ids[:end]
            for other in others
        )
