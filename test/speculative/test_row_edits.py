"""Each row of a draft is edited by what lies before it on its own path: known cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from truespec.batch import Batch, LogprobTable, ReqChunk
from truespec.core import Req
from truespec.engine.rows import prepare_rows
from truespec.kvcache import KVCache
from truespec.params import LogprobParams, SamplingParams
from truespec.speculative.base import chain_draft
from truespec.speculative.contract import Draft
from truespec.speculative.logprobs import verdict_logprobs
from truespec.speculative.sampling import process_step
from truespec.speculative.verify import verify

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=9)


def emitted(
    params: SamplingParams, draft_ids: list[int], logits: Tensor, output_ids: tuple[int, ...] = ()
) -> tuple[list[int], LogprobTable | None]:
    """Tokens and logprobs of one step over a chain of drafts; `logits` [1 + drafts, V]."""
    req = Req("r", [0], params, frozenset(), output_ids=list(output_ids))
    batch = Batch([ReqChunk(req, req.num_tokens - 1, 1, True, len(draft_ids))])
    return step_over(batch, chain_draft(batch, [draft_ids], [[0.0] * len(draft_ids)]), logits)


def step_over(batch: Batch, draft: Draft, logits: Tensor) -> tuple[list[int], LogprobTable | None]:
    cache = KVCache(
        num_pages=4, page_size=16, max_rows=1, max_tokens=64, lookahead=0, enable_prefix=False
    )
    assert cache.try_admit(batch.chunks[0].req, max_hit=0, num_tokens=32)
    rows = prepare_rows(batch, draft.token_ids, draft.parents, draft.cu_rows, cache)
    before, vocab_size = logits.clone(), logits.shape[1]
    masks = [None] * len(draft.token_ids)
    step = process_step(batch, draft, rows, logits, vocab_size, masks)
    verdict = verify(draft, step.sampled)
    table = verdict_logprobs(batch, logits, verdict, step, vocab_size)
    assert torch.equal(logits, before), "raw logits were changed"
    count = int(verdict.num_tokens[0])
    return verdict.token_ids[0, :count].tolist(), table


def test_a_penalty_counts_the_drafts_before_a_row() -> None:
    """B22: plain decoding gives 0, 1, ...; of the drafts 0, 0, 0 the first is right."""
    wish = LogprobParams(modes=("raw", "temperature", "processed"))
    params = replace(GREEDY, frequency_penalty=0.5, logprobs=wish)
    ids, table = emitted(params, [0, 0, 0], torch.tensor([[1.0, 0.9]] * 4))
    assert ids == [0, 1]
    assert table is not None
    raw, edited, processed = (table.chosen[mode][0][:2] for mode in range(3))
    assert raw == pytest.approx([-0.644397, -0.744397], abs=1e-5)
    assert edited == pytest.approx([-0.644397, -0.513015], abs=1e-5)
    assert processed == edited


@pytest.mark.parametrize("num_output", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_biased_token_is_emitted_in_no_row(temperature: float, num_output: int) -> None:
    """B20: every row favours token 2, which the request bans, and so does the drafter."""
    params = replace(GREEDY, temperature=temperature, logit_bias=((2, -100.0),))
    logits = torch.tensor([[0.1, 0.0, 9.0]] * 4)
    for seed in range(20):
        for draft_ids in ([], [2, 2, 2], [0, 2, 2], [0, 0, 0]):
            rows = logits[: len(draft_ids) + 1]
            ids, _ = emitted(replace(params, seed=seed), draft_ids, rows, (0,) * num_output)
            assert ids
            assert 2 not in ids


def test_raw_and_processed_logprobs_of_a_biased_row() -> None:
    """B19: the raw mode is read from what the model said, before any edit."""
    wish = LogprobParams(modes=("raw", "temperature"), token_ids=(0, 1, 2))
    params = replace(GREEDY, temperature=2.0, logit_bias=((2, -50.0),), logprobs=wish)
    _, table = emitted(params, [], torch.tensor([[1.0, 0.0, 2.0]]))
    assert table is not None
    assert table.asked[0][0][0] == pytest.approx([-1.407606, -2.407606, -0.407606], abs=1e-5)
    assert table.asked[1][0][0] == pytest.approx([-0.474077, -0.974077, -24.974077], abs=1e-5)


def test_a_row_of_a_tree_does_not_see_its_siblings() -> None:
    """Root, then 0 and 1, then what follows 0: a penalty there counts 0 once and never 1."""
    params = replace(GREEDY, presence_penalty=0.5)
    req = Req("r", [0], params, frozenset())
    batch = Batch([ReqChunk(req, 0, 1, True, 3)])
    draft = Draft(
        token_ids=torch.tensor([0, 1, 0, 1]),
        parents=torch.tensor([-1, 0, 0, 2]),
        cu_rows=torch.tensor([0, 4], dtype=torch.int32),
        logprobs=torch.zeros(4),
    )
    logits = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.0, 9.0], [1.0, 0.8, 0.0], [1.0, 0.8, 0.6]])
    # After 0: 0.5 against 0.8, so 1. After 0 and 1: 0.5 and 0.3 against 0.6, so 2.
    assert step_over(batch, draft, logits)[0] == [0, 1, 2]


def test_stop_ids_are_masked_until_min_tokens_are_out_inside_a_draft() -> None:
    params = replace(GREEDY, min_tokens=3)
    req = Req("r", [0], params, frozenset({2}), output_ids=[1])
    batch = Batch([ReqChunk(req, 1, 1, True, 3)])
    draft = chain_draft(batch, [[0, 0, 0]], [[0.0] * 3])
    logits = torch.tensor([[1.0, 0.0, 5.0]] * 4)
    assert step_over(batch, draft, logits)[0] == [0, 0, 2]


def test_a_bad_word_is_banned_where_the_draft_has_begun_it() -> None:
    params = replace(GREEDY, bad_words_ids=((0, 1), (0, 0, 2)))
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [0.5, 1.0, 3.0], [3.0, 1.0, 2.0]])
    # Row 0: 0 (the prompt's 0 makes 1 impossible). Row 1, after 0 0: neither 1 nor 2.
    ids, _ = emitted(params, [0, 0, 0], logits)
    assert ids == [0, 0, 0, 0]
