"""Structured output under speculation: what drafts may stay, and the tokens of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import drafter_engine
from harness import (
    DETAILED,
    FAMILIES,
    VOCAB_SIZE,
    Engine,
    Job,
    Result,
    engine_config,
    expect_plain,
    make_engine,
    make_prompts,
    plain,
    total,
)
from oracle import Rule, erring, guessing, numbered, oracle_engine, perfect
from self_drafter import self_drafting_engine

from tiny_tokens import EOS_ID, TINY_TOKENS
from truespec.batch import Batch, ReqChunk
from truespec.constrained.matcher import GrammarBackend
from truespec.core import Finish, Req
from truespec.params import Grammar, SamplingParams
from truespec.speculative.contract import Draft, Verdict
from truespec.speculative.grammars import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 120},
        "t": {"type": "array", "items": {"enum": ["no", "true"]}, "maxItems": 2},
    },
    "required": ["ab", "n", "t"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"(\d{1,3}\.){3}\d{1,3}"),
    Grammar("choice", json.dumps(["no", "nobody", "true"])),
    Grammar("json_object"),
    Grammar("lark", 'start: "[" item ("," item)* "]"\nitem: /[ab]{1,3}/'),
]
SETTINGS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "logprobs": DETAILED},
    {"temperature": 1.0, "frequency_penalty": 0.4, "logit_bias": ((5, 2.0),)},
]
PROMPTS = make_prompts(6, seed=4)
JOBS = numbered(
    [
        Job(
            PROMPTS[(i + j) % len(PROMPTS)],
            SamplingParams(max_tokens=60, grammar=grammar, **setting),  # type: ignore[arg-type]
            arrival=(3 * i + j) % 5,
        )
        for i, grammar in enumerate(GRAMMARS)
        for j, setting in enumerate(SETTINGS)
    ]
    + [
        Job(PROMPTS[0], SamplingParams(max_tokens=20)),
        Job(PROMPTS[1], SamplingParams(max_tokens=12)),
    ]
)
BACKEND = GrammarBackend(lambda: TINY_TOKENS, VOCAB_SIZE, (EOS_ID,))
A, B, C, D = (TINY_TOKENS.encode(letter, False)[0] for letter in "abcd")


def grammar_req(regex: str, output_ids: Sequence[int] = ()) -> Req:
    params = SamplingParams(seed=1, grammar=Grammar("regex", regex))
    return Req("r", [3, 4], params, frozenset({EOS_ID}), output_ids=list(output_ids))


def batch_of(*reqs: Req) -> Batch:
    return Batch([ReqChunk(req, req.num_tokens - 1, 1, True, 8) for req in reqs])


def draft_of(trees: list[list[tuple[int, int]]], *, with_logits: bool = False) -> Draft:
    """Each tree: (token, parent inside the tree) of its drafts; the root is row 0."""
    token_ids, parents, cu_rows = [], [], [0]
    for tree in trees:
        first = len(token_ids)
        token_ids += [4, *(token_id for token_id, _ in tree)]
        parents += [-1, *(first + parent for _, parent in tree)]
        cu_rows.append(len(token_ids))
    size = len(token_ids)
    return Draft(
        token_ids=torch.tensor(token_ids),
        parents=torch.tensor(parents),
        cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
        logprobs=-torch.arange(size, dtype=torch.float32),
        logits=torch.zeros(size, VOCAB_SIZE) if with_logits else None,
    )


def verdict_of(*emitted: list[int]) -> Verdict:
    width = max(map(len, emitted))
    padded = torch.tensor([ids + [-1] * (width - len(ids)) for ids in emitted])
    counts = torch.tensor([len(ids) for ids in emitted], dtype=torch.int32)
    return Verdict(padded, padded, counts, torch.zeros(len(emitted), dtype=torch.bool))


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(BACKEND)


def allowed(mask: torch.Tensor | None) -> set[int]:
    assert mask is not None
    words = [int(word) & 0xFFFFFFFF for word in mask]
    return {i for i in range(VOCAB_SIZE) if words[i // 32] >> (i % 32) & 1}


def test_a_forbidden_draft_is_dropped_with_what_follows_it(grammars: Grammars) -> None:
    batch = batch_of(grammar_req("ab"))
    found = grammars.constrain(batch, draft_of([[(A, 0), (C, 1), (B, 2)]]))
    assert found.draft.token_ids.tolist() == [4, A]
    assert found.draft.parents.tolist() == [-1, 0]
    assert found.draft.cu_rows.tolist() == [0, 2]
    assert allowed(found.masks[1]) == {B}
    # The target's own token completes the output; no mask is asked for after that.
    assert grammars.advance(batch, verdict_of([A, B])) == [2]


def test_the_row_after_the_end_of_a_grammar_has_no_mask(grammars: Grammars) -> None:
    batch = batch_of(grammar_req("ab"))
    found = grammars.constrain(batch, draft_of([[(A, 0), (B, 1), (D, 2)]]))
    assert found.draft.token_ids.tolist() == [4, A, B]
    assert found.masks[2] is None
    # What such a row chose is not counted: the output ended before.
    assert grammars.advance(batch, verdict_of([A, B, D])) == [2]


def test_drafts_do_not_advance_a_matcher(grammars: Grammars) -> None:
    req = grammar_req("[ab]{3}c")
    first = grammars.constrain(batch_of(req), draft_of([[(A, 0), (B, 1), (A, 2)]]))
    again = grammars.constrain(batch_of(req), draft_of([[]]))
    assert torch.equal(first.masks[0], again.masks[0])
    assert grammars.advance(batch_of(req), verdict_of([B])) == [None]
    follow = grammars.constrain(batch_of(req), draft_of([[(B, 0), (B, 1), (C, 2)]]))
    assert follow.draft.token_ids.tolist() == [4, B, B, C]


def test_a_matcher_is_made_again_from_the_output_after_a_retraction(grammars: Grammars) -> None:
    req = grammar_req("abcd")
    grammars.constrain(batch_of(req), draft_of([[]]))
    grammars.advance(batch_of(req), verdict_of([A, B]))
    req.output_ids += [A, B]
    grammars.forget(req)
    found = grammars.constrain(batch_of(req), draft_of([[(C, 0), (A, 1)]]))
    assert found.draft.token_ids.tolist() == [4, C]
    assert allowed(found.masks[0]) == {C}
    grammars.forget(req)
    namesake = grammar_req("[a-d]b")
    assert grammars.constrain(batch_of(namesake), draft_of([[(D, 0)]])).draft.token_ids[1] == D


def test_with_rejection_a_forbidden_draft_stays_alone(grammars: Grammars) -> None:
    batch = batch_of(grammar_req("ab"))
    found = grammars.constrain(batch, draft_of([[(A, 0), (C, 1), (B, 2)]], with_logits=True))
    assert found.draft.token_ids.tolist() == [4, A, C]
    assert found.draft.logits is not None
    assert found.draft.logits.shape[0] == 3
    assert found.masks[2] is None


def test_a_tree_keeps_the_allowed_paths_and_the_rows_of_others(grammars: Grammars) -> None:
    other = replace(grammar_req("a"), rid="other", params=SamplingParams(seed=1))
    # Breadth first: a and c and b at depth 1, then under each two of a, b, c.
    tree = [(A, 0), (C, 0), (B, 0), (B, 1), (C, 1), (A, 2), (A, 3), (C, 3), (C, 4), (A, 7)]
    found = grammars.constrain(
        batch_of(other, grammar_req("(ab|ba)[cd]")), draft_of([[(D, 0), (D, 1)], tree])
    )
    draft = found.draft
    assert draft.token_ids.tolist() == [4, D, D, 4, A, B, B, A, C]
    assert draft.parents.tolist() == [-1, 0, 1, -1, 3, 3, 4, 5, 6]
    assert draft.cu_rows.tolist() == [0, 3, 9]
    assert draft.logprobs.tolist() == [-0.0, -1, -2, -3, -4, -6, -7, -10, -12]
    assert found.masks[:3] == [None] * 3
    wanted = [{A, B}, {B}, {A}, {C, D}, {C, D}]
    assert [set(allowed(m)) & {A, B, C, D} for m in found.masks[3:8]] == wanted
    assert found.masks[8] is None


def outputs(jobs: Sequence[Job], results: Sequence[Result], grammar: Grammar) -> list[str]:
    """Texts of the requests with `grammar` that came to an end of their own."""
    return [
        TINY_TOKENS.text(result.token_ids)
        for job, result in zip(jobs, results, strict=True)
        if job.params.grammar == grammar and result.finish == Finish("stop")
    ]


@pytest.mark.parametrize(
    ("rule", "num_drafts", "width"),
    [(perfect, 4, 1), (erring(0.3, 1), 3, 1), (erring(0.2, 2), 8, 2), (guessing, 3, 1)],
    ids=["perfect", "erring", "tree", "guessing"],
)
def test_grammars_give_the_tokens_of_plain_decoding(
    rule: Rule, num_drafts: int, width: int
) -> None:
    family = FAMILIES[num_drafts % 3]
    results = oracle_engine(family, JOBS, rule, num_drafts=num_drafts, width=width).run(JOBS)
    expect_plain(family, JOBS, results)
    counts = total(results)
    if rule is perfect:
        assert counts.num_accepted > 150
        assert counts.num_accepted == counts.num_drafts
    elif rule is not guessing:
        assert counts.num_accepted > 0.4 * counts.num_drafts / width


@pytest.mark.parametrize(
    "name", ["ngram", "dspark", "eagle3 tree 4x4", "eagle chain", "multi-layer chained"]
)
def test_grammars_survive_retraction_chunks_and_prefix_hits(name: str) -> None:
    engine = drafter_engine(name, "llama", pool=160, chunk=11)
    for _ in range(2):
        expect_plain("llama", JOBS, engine.run(JOBS))
    assert engine.num_retractions > 0


@pytest.mark.parametrize("name", ["dspark", "eagle chain"])
def test_rejection_emits_what_the_grammar_allows(name: str) -> None:
    results = drafter_engine(name, "llama", accept="rejection").run(JOBS)
    assert total(results).num_drafts > 0
    for job, result in zip(JOBS, results, strict=True):
        assert result.finish is not None
        assert result.finish.kind in ("stop", "length")
        if job.params.grammar is not None:
            matcher = BACKEND.matcher(job.params.grammar)
            assert all(matcher.try_advance(token_id) for token_id in result.token_ids)
            ends = matcher.is_complete
            assert ends == (result.finish.kind == "stop")


def test_of_good_drafts_all_that_the_grammar_allows_are_accepted() -> None:
    """The target drafts for itself without the grammar: what stays of that is what it chooses."""
    engine = self_drafting_engine("llama")
    engine.worker.grammars = Grammars(BACKEND)
    jobs = [
        replace(job, params=replace(job.params, temperature=0.0))
        for job in JOBS
        if job.params.grammar is not None
    ]
    results = engine.run(jobs)
    expect_plain("llama", jobs, results)
    counts = total(results)
    assert counts.num_drafts > 50
    assert counts.num_accepted == counts.num_drafts


def test_outputs_follow_their_grammar_at_any_temperature() -> None:
    results = [plain("llama", job.prompt_ids, job.params) for job in JOBS]
    objects = [json.loads(text) for text in outputs(JOBS, results, GRAMMARS[0])]
    assert len(objects) >= 2
    for value in objects:
        assert set(value) == {"ab", "n", "t"}
        assert 0 <= value["n"] <= 120
        assert len(value["ab"]) <= 5
    for text in outputs(JOBS, results, GRAMMARS[1]):
        assert len(text.split(".")) == 4
    choices = outputs(JOBS, results, GRAMMARS[2])
    assert len(choices) >= 2
    assert set(choices) <= {"no", "nobody", "true"}


def test_an_output_ends_where_its_grammar_does_even_inside_a_draft() -> None:
    grammar = Grammar("regex", "[a-f]{6}")
    job = Job(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, grammar=grammar, seed=1))
    wanted = plain("llama", job.prompt_ids, job.params)
    assert wanted.finish == Finish("stop")
    assert len(TINY_TOKENS.text(wanted.token_ids)) == 6

    for num_drafts in range(1, 10):

        def beyond(right: Sequence[int], place: int, size: int = num_drafts) -> list[int]:
            return [*right, A, B, EOS_ID][:size]  # goes on after the end

        engine = oracle_engine("llama", [job], beyond, num_drafts=num_drafts)
        expect_plain("llama", [job], engine.run([job]))


def test_a_grammar_at_the_token_limit_ends_like_an_end_of_sequence_there() -> None:
    grammar = Grammar("regex", "[a-f]{4}")
    params = SamplingParams(temperature=0.0, grammar=grammar, seed=1)
    length = len(plain("llama", PROMPTS[0], params).token_ids)
    at_limit = plain("llama", PROMPTS[0], replace(params, max_tokens=length))
    assert at_limit.finish == Finish("stop")
    below = plain("llama", PROMPTS[0], replace(params, max_tokens=length - 1))
    assert below.finish == Finish("length")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"allowed_token_ids": (D,)}, "allowed_token_ids and the grammar forbid every one"),
        ({"grammar": Grammar("regex", "z+")}, "no token of the vocabulary begins with"),
        ({"grammar": Grammar("lark", "start: nothing")}, "nothing"),
    ],
)
def test_a_grammar_that_leaves_no_token_fails_its_own_request_by_name(
    fields: dict[str, object], reason: str
) -> None:
    good = numbered([Job(PROMPTS[1], SamplingParams(max_tokens=12)), JOBS[0]])
    bad = SamplingParams(seed=9, **{"grammar": Grammar("regex", "[ab]+"), **fields})  # type: ignore[arg-type]
    engine: Engine = make_engine("llama", engine_config())
    results = engine.run([Job(PROMPTS[0], bad), *good])
    finish = results[0].finish
    assert finish is not None
    assert finish.kind == "error"
    assert reason in finish.message
    assert results[0].records == []
    expect_plain("llama", good, results[1:])


def test_no_grammar_loads_no_tokenizer(tmp_path: Path) -> None:
    def fail() -> None:
        raise AssertionError("the tokenizer was read")

    engine = make_engine("llama", engine_config("NGRAM"))
    engine.worker.grammars = Grammars(GrammarBackend(fail, VOCAB_SIZE, (EOS_ID,)))  # type: ignore[arg-type]
    expect_plain("llama", JOBS[-2:], engine.run(JOBS[-2:]))
