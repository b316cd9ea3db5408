"""Grammars of the running requests: which drafts may stay, what each row may choose, when it ends.

Knows batches, drafts and verdicts; the language of grammars is behind `constrained`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truespec.batch import Batch
from truespec.constrained.matcher import GrammarBackend, Matcher
from truespec.constrained.vocabulary import GrammarError
from truespec.core import Req
from truespec.speculative.contract import Draft, Verdict

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConstrainedDraft:
    """A draft without what grammars forbid.

    Attributes:
        draft: rows that are worth verifying.
        masks: per row the words of `RowEdits.bitmask`, `None` where no grammar acts (also in rows
            after a grammar's end: they are never on an emitted path).
    """

    draft: Draft
    masks: list[Tensor | None]


class Grammars:
    """A matcher per request with a grammar, made at its first step and again after a retraction.

    Matchers advance by emitted tokens only; for drafts they go forth and back.
    """

    def __init__(self, backend: GrammarBackend) -> None:
        self._backend = backend
        self._matchers: dict[str, Matcher] = {}
        self._problems: dict[str, str] = {}

    def constrain(self, batch: Batch, draft: Draft) -> ConstrainedDraft:
        """Drop forbidden drafts with all that hangs on them, and give every row its mask.

        With draft logits (rejection) a forbidden draft stays, alone, to be rejected: which rows are
        drawn from the residual must not depend on the drafts.
        """
        reqs = [chunk.req for chunk in batch.chunks if chunk.samples]
        if all(req.params.grammar is None for req in reqs):
            return ConstrainedDraft(draft, [None] * len(draft.token_ids))
        cu, ids, parents = draft.cu_rows.tolist(), draft.token_ids.tolist(), draft.parents.tolist()
        masks: dict[int, Tensor | None] = {}
        for index, req in enumerate(reqs):
            rows = range(cu[index], cu[index + 1])
            if req.params.grammar is None:
                masks.update(dict.fromkeys(rows))
            else:
                masks.update(self._walk(req, rows, ids, parents, draft.logits is not None))
        return ConstrainedDraft(_keep(draft, sorted(masks)), [masks[row] for row in sorted(masks)])

    def advance(self, batch: Batch, verdict: Verdict) -> list[int | None]:
        """Follow the emitted tokens.

        Returns per sampling chunk how many of them complete its grammar, `None` if they do not.
        """
        ends: list[int | None] = []
        if not self._matchers:
            return [None] * verdict.num_tokens.shape[0]
        emitted, counts = verdict.token_ids.tolist(), verdict.num_tokens.tolist()
        for chunk in batch.chunks:
            if chunk.samples:
                index = len(ends)
                ends.append(self._follow(chunk.req, emitted[index][: counts[index]]))
        return ends

    def problem(self, req: Req) -> str | None:
        """Why the grammar of a request cannot be followed any more, `None` if it can."""
        return self._problems.get(req.rid)

    def forget(self, req: Req) -> None:
        """The request left its row."""
        self._matchers.pop(req.rid, None)
        self._problems.pop(req.rid, None)

    def _walk(
        self,
        req: Req,
        rows: range,
        token_ids: Sequence[int],
        parents: Sequence[int],
        keeps_forbidden: bool,
    ) -> dict[int, Tensor | None]:
        """Masks of a request's rows that stay: the root, and drafts along allowed paths."""
        root = rows[0]
        try:
            cursor = _Cursor(self._matcher(req))
            masks: dict[int, Tensor | None] = {root: cursor.mask(())}
            paths: dict[int, Path] = {root: ()}  # of rows that a draft may hang on
            for row in rows[1:]:
                path = paths.get(parents[row])
                if path is None:
                    continue
                path = (*path, token_ids[row])
                if not cursor.try_move(path):
                    if keeps_forbidden:
                        masks[row] = None
                    continue
                masks[row] = None if cursor.is_complete else cursor.mask(path)
                if not cursor.is_complete:
                    paths[row] = path
            cursor.move_back()
        except GrammarError as error:
            self._problems[req.rid] = f"the grammar cannot be followed: {error}"
            return {root: torch.zeros(self._backend.num_mask_words, dtype=torch.int32)}
        return masks

    def _follow(self, req: Req, token_ids: list[int]) -> int | None:
        matcher = self._matchers.get(req.rid)
        if matcher is None or req.rid in self._problems:
            return None
        try:
            for place, token_id in enumerate(token_ids):
                if not matcher.try_advance(token_id):
                    raise GrammarError(f"token {token_id} passed its mask, but does not fit")
                if matcher.is_complete:
                    return place + 1
        except GrammarError as error:
            self._problems[req.rid] = f"the grammar cannot be followed: {error}"
        return None

    def _matcher(self, req: Req) -> Matcher:
        matcher = self._matchers.get(req.rid)
        if matcher is None:
            assert req.params.grammar is not None, "asked for a request without grammar"
            matcher = self._backend.matcher(req.params.grammar)
            for token_id in req.output_ids:
                if not matcher.try_advance(token_id):
                    raise GrammarError(f"token {token_id} of the output does not fit it")
            self._matchers[req.rid] = matcher
        return matcher


class _Cursor:
    """A matcher that visits the paths of a tree of drafts."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._path: Path = ()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_complete

    def try_move(self, path: Path) -> bool:
        """Stand after `path`; False, and before its last token, when that is forbidden."""
        shared = 0
        while (
            shared < len(path) - 1 and self._path[shared : shared + 1] == path[shared : shared + 1]
        ):
            shared += 1
        self._matcher.rollback(len(self._path) - shared)
        for place in range(shared, len(path)):
            if not self._matcher.try_advance(path[place]):
                self._path = path[:place]
                return False
        self._path = path
        return True

    def mask(self, path: Path) -> Tensor:
        """[ceil(V / 32)] int32 words after `path`, where the cursor stands."""
        assert path == self._path, f"the cursor is at {self._path}, not at {path}"
        return torch.frombuffer(bytearray(self._matcher.mask()), dtype=torch.int32)

    def move_back(self) -> None:
        """Stand at the root again."""
        self._matcher.rollback(len(self._path))
        self._path = ()


def _keep(draft: Draft, rows: list[int]) -> Draft:
    """The draft with these rows only, ascending; the parents of a kept row are kept."""
    if len(rows) == len(draft.token_ids):
        return draft
    index = torch.tensor(rows)
    place = torch.full_like(draft.parents, -1)
    place[index] = torch.arange(len(rows))
    parents = draft.parents[index]
    return replace(
        draft,
        token_ids=draft.token_ids[index],
        parents=torch.where(parents < 0, parents, place[parents.clamp_min(0)]),
        cu_rows=torch.searchsorted(index, draft.cu_rows.to(torch.int64)).to(torch.int32),
        logprobs=draft.logprobs[index],
        confidences=None if draft.confidences is None else draft.confidences[index],
        logits=None if draft.logits is None else draft.logits[index],
    )
