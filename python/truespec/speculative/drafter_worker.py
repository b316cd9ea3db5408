"""What all workers with draft weights share: which requests to draft for, and the draft cache.

Prompt rows extend the draft cache at once. Rows of decoding requests wait until their request is
drafted for or its pages are shared, so that steps without drafts cost what plain decoding costs.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.config import EngineConfig, draft_quantization
from truespec.core import Req
from truespec.engine.rows import take_rows
from truespec.kernels.api import KVBuffers
from truespec.models.llama import CausalLM
from truespec.speculative.backlog import Backlog, FreshRows
from truespec.speculative.base import EngineParts, SpecWorker, StepState, WorkerPlan, chain_draft
from truespec.speculative.chains import ChainDrafts, DraftSampler, draft_of_chains
from truespec.speculative.contract import Draft

MAX_HELD = 256  # positions per request that wait


class Drafting(NamedTuple):
    """The requests of a step that get drafts.

    Attributes:
        batch: the whole step.
        places: which of its sampling chunks these are, ascending.
        chunks: these chunks. counts: drafts that each may have, at least 1.
        fresh: what their draft cache lacks before their roots, if anything.
    """

    batch: Batch
    places: list[int]
    chunks: list[ReqChunk]
    counts: list[int]
    fresh: FreshRows | None

    @property
    def other_rows(self) -> int:
        """Rows of the step beside the roots of these requests."""
        return sum(chunk.num_rows for chunk in self.batch.chunks) - len(self.chunks)

    @property
    def reqs(self) -> list[Req]:
        """Their requests."""
        return [chunk.req for chunk in self.chunks]


class DrafterWorker(SpecWorker):
    """A worker whose drafts come from a model; subclasses fill in two methods."""

    def __init__(self, parts: EngineParts, plan: WorkerPlan, target_ids: Tensor | None) -> None:
        """`target_ids`: see `DraftSampler`."""
        super().__init__(parts, plan)
        self.sampler = DraftSampler(self.info.vocab_size, target_ids, self.is_rejection)
        self.backlog = Backlog(self.cache)

    @abstractmethod
    def make_drafts(self, drafting: Drafting) -> Draft:
        """Roots of all sampling chunks, and drafts of those that get some.

        The draft cache of these is complete up to their roots but for `drafting.fresh`, by which
        this extends it.
        """

    @abstractmethod
    def extend_rows(self, fresh: FreshRows) -> None:
        """Fill the draft KV of positions that follow what their requests have."""

    @property
    def draft_kv(self) -> KVBuffers:
        """K/V of the draft layers."""
        assert self.runner.pool.draft is not None, "the pool has no draft layers"
        return self.runner.pool.draft

    def most_drafts(self, chunk: ReqChunk) -> int:
        return 0 if self.backlog.has_gap(chunk.req) else super().most_drafts(chunk)

    def draft(self, batch: Batch) -> Draft:
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        counts = [self.planned_drafts(chunk) for chunk in chunks]
        places = [place for place, count in enumerate(counts) if count]
        waiting = max((self.backlog.size(chunks[place].req) for place in places), default=0)
        self.has_caught_up = waiting > self.num_drafts + 1
        if not places:
            return chain_draft(batch, [[] for _ in chunks], [[] for _ in chunks])
        chosen = [chunks[place] for place in places]
        fresh = self.backlog.take([chunk.req for chunk in chosen])
        counts = [counts[place] for place in places]
        return self.make_drafts(Drafting(batch, places, chosen, counts, fresh))

    def extend(self, state: StepState) -> None:
        """Hold the rows of decoding requests and extend by all others, but by none after a gap."""
        chunks = state.batch.chunks
        self._keep_or_drop([c.req for c in chunks if self.backlog.size(c.req) >= MAX_HELD])
        counts = state.committed.counts
        late, now = [], []
        for index, chunk in enumerate(chunks):
            if self.backlog.has_gap(chunk.req):
                self.backlog.leave_out(chunk.req, chunk.start, chunk.start + counts[index])
            elif chunk.samples and chunk.num_rows == 1 and chunk.req.output_ids:
                late.append(index)
            else:
                now.append(index)
        if late:
            self._hold(state, late)
        if now:
            self._extend_now(state, now)

    def settle(self, req: Req) -> None:
        self._keep_or_drop([req])

    def forget(self, req: Req) -> None:
        super().forget(req)
        self.backlog.forget(req)

    def draft_of(self, drafting: Drafting, drafts: ChainDrafts) -> Draft:
        """Of the chains that were made, what is worth verifying."""
        lengths = self.lengths(drafting, drafts)
        return draft_of_chains(drafting.batch, drafting.places, lengths, drafts)

    def lengths(self, drafting: Drafting, drafts: ChainDrafts) -> list[int]:
        """How many drafts of each chain to verify: as far as it pays, by their chances."""
        survivals = []
        made = zip(drafting.chunks, drafts.logprobs, drafting.counts, strict=True)
        for chunk, logprobs, count in made:
            is_greedy = chunk.req.params.temperature == 0
            survivals.append(
                self.planner.expect(chunk.req.rid, logprobs[:count], is_greedy=is_greedy)
            )
        if self.is_rejection:
            # NOTE: rejection keeps its law only if a draft's admission depends neither on its own
            # token nor on what comes after it; chances do on the one, ranking them on the other.
            return drafting.counts
        return self.planner.trim(survivals, drafting.other_rows)

    def catch_up(self, reqs: list[Req]) -> None:
        """Extend by all that waits for some requests."""
        fresh = self.backlog.take(reqs)
        if fresh is not None:
            self.extend_rows(fresh)

    def _keep_or_drop(self, reqs: list[Req]) -> None:
        """Extend by what waits, if requests of late were worth drafting for."""
        if self.planner.pays:
            self.catch_up(reqs)
        else:
            for req in reqs:
                self.backlog.drop(req)

    def _hold(self, state: StepState, late: list[int]) -> None:
        source, row = self._read(state, late), 0
        for index in late:
            chunk, count = state.batch.chunks[index], state.committed.counts[index]
            self.backlog.hold(chunk.req, chunk.start, source, row, count)
            row += count

    def _extend_now(self, state: StepState, now: list[int]) -> None:
        chunks = [state.batch.chunks[index] for index in now]
        fresh = FreshRows(
            [chunk.req for chunk in chunks],
            [chunk.start for chunk in chunks],
            [state.committed.counts[index] for index in now],
            self._read(state, now),
            [_emitted(state, index) for index in now],
        )
        self.backlog.fill(fresh)
        self.extend_rows(fresh)

    def _read(self, state: StepState, chosen: list[int]) -> Tensor:
        """What the drafter reads of the target at the committed rows of some chunks."""
        source = state.output.features if self.capture else state.output.hidden
        assert source is not None, "the target's layers are captured"
        committed = state.committed
        ends = list(accumulate(committed.counts))
        rows: list[int] = []
        for index in chosen:
            rows += committed.rows[ends[index] - committed.counts[index] : ends[index]]
        return take_rows(source, rows)


def _emitted(state: StepState, index: int) -> list[int]:
    """Tokens that the step emits for a chunk."""
    chunks = state.batch.chunks
    if not chunks[index].samples:
        return []
    place = sum(chunk.samples for chunk in chunks[:index])
    return state.verdict.token_ids[place, : int(state.verdict.num_tokens[place])].tolist()


def draft_weight_type(config: EngineConfig, target: CausalLM) -> str | None:
    """GGUF's name of the type that a drafter's matrices get; `None` leaves them as stored."""
    chosen = draft_quantization(config, target.kernels.name)
    return None if chosen == "none" else chosen.upper()
