"""Continuous batching: admits requests, runs steps, commits results. Knows no algorithm."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from truespec.batch import Batch, StepOutput
from truespec.core import Finish, Req, TokenRecord
from truespec.engine.worker import Worker
from truespec.message import Abort, EngineStats, Output, Submit
from truespec.scheduler.commit import commit_chunk
from truespec.scheduler.policy import Policy

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns every request from `submit` to its one last output.

    Args:
        worker: runs the steps.
        max_prefill_rows: prompt rows per step at most.
    """

    def __init__(self, worker: Worker, *, max_prefill_rows: int) -> None:
        self._worker = worker
        cache = worker.cache
        self.max_request_tokens = min(
            worker.info.context_length, cache.num_pages * cache.page_size - worker.num_draft_slots
        )
        self._policy = Policy(
            cache,
            max_prefill_rows=max_prefill_rows,
            num_draft_slots=worker.num_draft_slots,
            max_request_tokens=self.max_request_tokens,
            settle=worker.settle,
        )
        self._reqs: dict[str, Req] = {}
        self._rejected: list[Output] = []
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._num_steps = 0
        self._num_rows = 0

    @property
    def has_work(self) -> bool:
        """A `step` would do something."""
        return bool(self._reqs or self._rejected)

    def submit(self, message: Submit) -> None:
        """Take a request; what cannot run is answered by the next `step`."""
        problem = self._problem(message)
        if problem is not None:
            finish = Finish("error", message=problem)
            self._rejected.append(Output(message.rid, [], finish=finish))
            return
        params = message.params
        eos = () if params.ignore_eos else self._worker.info.eos_token_ids
        req = Req(
            rid=message.rid,
            prompt_ids=list(message.prompt_ids),
            params=params,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            priority=message.priority,
            arrival=time.monotonic(),
        )
        self._reqs[req.rid] = req
        self._policy.enqueue(req)

    def abort(self, message: Abort) -> Output | None:
        """End a request now; `None` when it is over already."""
        req = self._reqs.pop(message.rid, None)
        if req is None:
            return None
        self._leave(req, keep=True)
        return Output(req.rid, [], finish=Finish("abort", message=message.reason))

    def step(self) -> list[Output]:
        """Run one batch; returns what became known, at most one output per request."""
        outputs, self._rejected = self._rejected, []
        batch, retracted = self._policy.next_batch()
        for req in retracted:
            self._worker.forget(req)
        if not batch.chunks:
            return outputs
        for chunk in batch.chunks:
            if chunk.req.num_cached_tokens is None:
                chunk.req.num_cached_tokens = chunk.start
                self._num_prompt_tokens += len(chunk.req.prompt_ids)
                self._num_cached_prompt_tokens += chunk.start
        try:
            result = self._worker.step(batch)
        except Exception as error:  # the step is lost, the engine is not
            logger.exception("a step failed; its %d requests are ended", len(batch.chunks))
            return outputs + self._fail(batch, f"internal error ({type(error).__name__})")
        self._num_steps += 1
        self._num_rows += sum(c.num_rows for c in batch.chunks) + sum(result.num_drafts)
        return outputs + self._commit(batch, result)

    def flush_cache(self) -> int:
        """Drop idle pages of the prefix cache; returns how many."""
        return self._worker.cache.flush()

    def stats(self) -> EngineStats:
        """Gauges and totals."""
        cache = self._worker.cache
        return EngineStats(
            num_running=len(self._policy.running),
            num_waiting=len(self._policy.waiting),
            num_pages=cache.num_pages,
            num_pages_used=cache.num_pages - cache.num_available,
            num_pages_cached=cache.prefix.num_pages,
            page_size=cache.page_size,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            num_steps=self._num_steps,
            num_forward_rows=self._num_rows,
            num_retractions=self._policy.num_retractions,
        )

    def check_idle(self) -> None:
        """Assert that nothing is left over when no request is open."""
        assert not self._reqs, f"{len(self._reqs)} requests are open"
        assert not self._policy.waiting + self._policy.running, "a request was lost"
        self._worker.cache.check_idle()

    def _problem(self, message: Submit) -> str | None:
        if message.rid in self._reqs:
            return f"request id {message.rid} is in use"
        if not message.prompt_ids:
            return "the prompt is empty"
        wanted = len(message.prompt_ids) + message.params.max_tokens
        if wanted > self.max_request_tokens:
            return f"prompt + max_tokens is {wanted}, at most {self.max_request_tokens} fit"
        return None

    def _commit(self, batch: Batch, result: StepOutput) -> list[Output]:
        outputs = []
        for index, chunk in enumerate(batch.chunks):
            req = chunk.req
            kept = commit_chunk(chunk, result, index, max_tokens=self.max_request_tokens)
            has_failed = kept.finish is not None and kept.finish.kind == "error"
            is_first = not req.is_prefilling and len(req.output_ids) == len(kept.records)
            if is_first and not has_failed:
                self._worker.cache.share(req, req.num_computed)
            if kept.finish is not None:
                del self._reqs[req.rid]
                self._leave(req, keep=not has_failed)
            if kept.records or kept.finish is not None:
                outputs.append(_output(req, kept.records, kept.finish))
        return outputs

    def _fail(self, batch: Batch, message: str) -> list[Output]:
        for chunk in batch.chunks:
            del self._reqs[chunk.req.rid]
            self._leave(chunk.req, keep=False)
        finish = Finish("error", message=message)
        return [Output(chunk.req.rid, [], finish=finish) for chunk in batch.chunks]

    def _leave(self, req: Req, *, keep: bool) -> None:
        self._policy.remove(req, keep=keep)
        self._worker.forget(req)


def _output(req: Req, records: Iterable[TokenRecord], finish: Finish | None) -> Output:
    records = list(records)
    is_first = len(req.output_ids) == len(records)
    return Output(
        req.rid,
        records,
        finish=finish,
        prompt_records=req.prompt_records if is_first else [],
        num_cached_tokens=req.num_cached_tokens or 0,
    )
