"""Structured output from text to text, on a tokenizer whose tokens may be parts of characters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from truespec import LLM, SamplingParams
from truespec.config import EngineConfig
from truespec.params import Grammar
from truespec.tokenizer.errors import BadRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "wörd": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": -5, "maximum": 500},
        "kind": {"enum": ["größe", "straße"]},
    },
    "required": ["wörd", "count", "kind"],
    "additionalProperties": False,
}
PROMPTS = [f"Number {i} and the other one:" for i in range(6)]


@pytest.fixture(scope="module", params=["NONE", "NGRAM"])
def llm(request: pytest.FixtureRequest, tiny_llama: Path) -> LLM:
    algorithm = request.param
    return LLM(
        EngineConfig(
            model_path=str(tiny_llama), max_total_tokens=2048, speculative_algorithm=algorithm
        )
    )


def params(grammar: Grammar, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=90, grammar=grammar)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_every_finished_output_is_json_of_the_schema(llm: LLM, temperature: float) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    wanted = [params(grammar, temperature, seed) for seed in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, wanted)
    values = [json.loads(output.text) for output in outputs if output.finish.kind == "stop"]
    assert len(values) >= 3
    for value in values:
        assert set(value) == {"wörd", "count", "kind"}
        assert len(value["wörd"]) <= 6
        assert -5 <= value["count"] <= 500
        assert value["kind"] in ("größe", "straße")


def test_text_and_ids_end_at_the_same_token(llm: LLM) -> None:
    grammar = Grammar("regex", r"[a-f]{5}(é|ß)")
    for output in llm.generate(PROMPTS, [params(grammar, 1.0, seed) for seed in range(6)]):
        assert re.fullmatch(r"[a-f]{5}(é|ß)", output.text)
        assert output.finish == ("stop", None, "")
        assert llm.tokenizer.decode(output.token_ids) == output.text


def test_a_grammar_that_cannot_be_followed_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="nothing"):
        llm.generate("x", params(Grammar("json_schema", '{"type": "nothing"}'), 0.0, 0))
    with pytest.raises(BadRequest, match="special token"):
        llm.generate("x", params(Grammar("lark", "start: <|nobody|>"), 0.0, 0))
    assert llm.generate("x", params(Grammar("lark", 'start: "a" <|im_end|>'), 0.0, 0))[0].records
