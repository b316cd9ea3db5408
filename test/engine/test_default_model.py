"""The packaged model against transformers on its dequantised weights: a few tokens."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from truespec import LLM, SamplingParams, env
from truespec.config import Algorithm, EngineConfig
from truespec.llm import Generation
from truespec.params import LogprobParams
from truespec.utils.model_path import resolve_model_path

NAMES = {
    "blk": "layers",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ATOL = 5e-4
MESSAGES = [{"role": "user", "content": "Count: one, two, three, one, two, three, one, two,"}]
ASKED = LogprobParams(top_k=5, modes=("raw", "temperature"), start=0)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, seed=1, logprobs=ASKED),
    SamplingParams(temperature=0.7, max_tokens=16, seed=2, logprobs=ASKED),
]


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    reader = gguf.GGUFReader(resolve_model_path("smollm2"))
    facts = {
        name.removeprefix("llama."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith("llama.")
    }
    config = transformers.LlamaConfig(
        vocab_size=facts["vocab_size"],
        hidden_size=facts["embedding_length"],
        intermediate_size=facts["feed_forward_length"],
        num_hidden_layers=facts["block_count"],
        num_attention_heads=facts["attention.head_count"],
        num_key_value_heads=facts["attention.head_count_kv"],
        rms_norm_eps=facts["attention.layer_norm_rms_epsilon"],
        rope_theta=facts["rope.freq_base"],
        max_position_embeddings=facts["context_length"],
        tie_word_embeddings=True,
    )
    with torch.device("meta"):  # no time for random weights
        model = transformers.LlamaForCausalLM(config).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        stem, name = tensor.name.removesuffix(".weight"), ""
        for part in stem.split("."):
            name += NAMES.get(part, part) + "."
            if part in heads:  # llama.cpp keeps the two halves of a rotary pair side by side
                pairs = values.view(heads[part], -1, 2, values.shape[1])
                values = pairs.transpose(1, 2).reshape(values.shape)
        weights[f"model.{name}weight"] = values
    missing = model.load_state_dict(weights, strict=False, assign=True)
    assert missing.missing_keys == ["lm_head.weight"]
    assert missing.unexpected_keys == []
    model.tie_weights()
    return model


def generate(algorithm: Algorithm, *, is_lossy: bool = False) -> list[Generation]:
    config = EngineConfig(
        speculative_algorithm=algorithm,
        max_total_tokens=1024,
        speculative_adaptive=False,
        lossy_int8_activations=is_lossy,
    )
    llm = LLM(config)
    return llm.chat([MESSAGES] * len(PARAMS), PARAMS)


@pytest.fixture(scope="module")
def plain() -> list[Generation]:
    return generate("NONE")


def assert_same_records(plain: list[Generation], drafted: list[Generation]) -> None:
    for one, other in zip(plain, drafted, strict=True):
        assert [(r.token_id, r.modes) for r in one.records] == [
            (r.token_id, r.modes) for r in other.records
        ]
        assert one.prompt_records == other.prompt_records


@pytest.mark.parametrize("algorithm", ["NGRAM", "DSPARK"])
def test_speculation_changes_no_record_of_the_packaged_model(
    algorithm: Algorithm, plain: list[Generation]
) -> None:
    drafted = generate(algorithm)
    assert_same_records(plain, drafted)
    assert sum(one.acceptance.num_accepted for one in drafted) > 0


@pytest.mark.skipif(env.cpu_kernels() == "torch", reason="only the compiled kernels have it")
def test_lossy_activations_move_logprobs_a_little_and_speculation_nothing(
    plain: list[Generation],
) -> None:
    lossy, drafted = (generate(algorithm, is_lossy=True) for algorithm in ("NONE", "DSPARK"))
    assert_same_records(lossy, drafted)
    assert sum(one.acceptance.num_accepted for one in drafted) > 0
    pairs = zip(plain[0].prompt_records[1:], lossy[0].prompt_records[1:], strict=True)
    moved = [abs(a.modes[0].logprob - b.modes[0].logprob) for a, b in pairs]
    assert 1e-3 < max(moved) < 1.0
    assert sum(moved) / len(moved) < 0.2


@pytest.mark.skipif(env.cpu_kernels() == "torch", reason="only the compiled kernels have it")
def test_lossy_activations_are_refused_where_no_weight_is_quantized(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="--lossy-int8-activations: the model has no quantized"):
        LLM(EngineConfig(model_path=str(tiny_llama), lossy_int8_activations=True))


def test_logprobs_of_the_packaged_model_equal_transformers(
    plain: list[Generation], oracle: transformers.PreTrainedModel
) -> None:
    for generation, params in zip(plain, PARAMS, strict=True):
        text = [*generation.prompt_ids, *generation.token_ids]
        with torch.no_grad():
            logits = oracle(torch.tensor([text])).logits[0]
        raw = logits.log_softmax(-1)
        scaled = (logits / (params.temperature or 1.0)).log_softmax(-1)
        for position, entry in enumerate(generation.prompt_records[1:], 1):
            wanted = raw[position - 1, entry.token_id].item()
            assert entry.modes[0].logprob == pytest.approx(wanted, abs=ATOL)
        start = len(generation.prompt_ids) - 1
        for place, record in enumerate(generation.records):
            rows = (raw[start + place], scaled[start + place])
            for mode, row in zip(record.modes, rows, strict=True):
                assert mode.logprob == pytest.approx(row[record.token_id].item(), abs=ATOL)
                best = row.topk(5)
                assert mode.top_logprobs == pytest.approx(best.values.tolist(), abs=ATOL)
                if (-best.values.diff()).min() > 2 * ATOL:
                    assert mode.top_ids == best.indices.tolist()
                assert math.exp(mode.top_logprobs[0]) <= 1
