"""Every family against transformers, through chunks and a paged cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paged import extend_batch, kv_buffers, logits_in_chunks, shuffled_pages
from tiny import Option, tiny_checkpoint, tiny_model
from truespec.kernels.api import KernelSet
from truespec.kernels.reference import ReferenceKernels
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model

CHUNKS = [7, 1, 12, 1, 19]
LLAMA3_ROPE: dict[str, Option] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE: dict[str, Option] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Option]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama with odd sizes": (
        "llama",
        {"intermediate_size": 91, "hidden_size": 60, "head_dim": 48, "vocab_size": 301},
    ),
    "llama with wide heads": ("llama", {"head_dim": 32}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "yarn rope": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "yarn rope with options": (
        "llama",
        {
            "rope_parameters": YARN_ROPE
            | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.4}
            | {"truncate": False}
        },
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return torch.randint(0, 300, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))


def oracle_logits(family: str, token_ids: Tensor, **options: Option) -> Tensor:
    """[n, vocab] of transformers in fp32, in one pass."""
    with torch.no_grad():
        return tiny_model(family, **options)(token_ids.unsqueeze(0)).logits[0]


def load(directory: Path) -> CausalLM:
    return load_model(directory, ReferenceKernels())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(
    variant: str, tmp_path: Path, token_ids: Tensor, kernels: KernelSet
) -> None:
    family, options = VARIANTS[variant]
    model = load_model(tiny_checkpoint(tmp_path, family, **options), kernels)
    logits = logits_in_chunks(model, token_ids, CHUNKS, page_size=32)
    expected = oracle_logits(family, token_ids, **options)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.5  # the comparison means something


def test_a_sharded_checkpoint_gives_the_same_bits_as_a_single_file(
    tmp_path: Path, token_ids: Tensor
) -> None:
    single = load(tiny_checkpoint(tmp_path / "one", "qwen2"))
    sharded_dir = tiny_checkpoint(tmp_path / "many", "qwen2", max_shard_size="100KB")
    assert len(list(sharded_dir.glob("*.safetensors"))) > 2
    expected = logits_in_chunks(single, token_ids, CHUNKS)
    assert torch.equal(logits_in_chunks(load(sharded_dir), token_ids, CHUNKS), expected)


def rounded_oracle_logits(token_ids: Tensor, *, vectors: bool) -> Tensor:
    """Logits of the tiny Llama with matrices (and vectors, if asked) rounded to bfloat16."""
    oracle = tiny_model("llama")
    with torch.no_grad():
        for parameter in oracle.parameters():
            if vectors or parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16())
        return oracle(token_ids.unsqueeze(0)).logits[0]


def test_a_bfloat16_checkpoint_is_computed_with_its_exact_values(
    tmp_path: Path, token_ids: Tensor
) -> None:
    model = load(tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16))
    assert model.config.dtype == "bfloat16"
    logits = logits_in_chunks(model, token_ids, CHUNKS)
    expected = rounded_oracle_logits(token_ids, vectors=True)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_dtype_override_rounds_the_matrices(tiny_llama: Path, token_ids: Tensor) -> None:
    rounded = load_model(tiny_llama, ReferenceKernels(), dtype="bfloat16")
    assert rounded.embed_weight.type == "BF16"
    logits = logits_in_chunks(rounded, token_ids, CHUNKS)
    expected = rounded_oracle_logits(token_ids, vectors=False)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_old_spellings_of_config_json_mean_the_same(tmp_path: Path, token_ids: Tensor) -> None:
    directory = tiny_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    expected = logits_in_chunks(load(directory), token_ids, CHUNKS)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling | {"type": scaling.pop("rope_type")}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    assert torch.equal(logits_in_chunks(load(directory), token_ids, CHUNKS), expected)


def test_captured_layers_are_the_hidden_states_of_transformers(
    tiny_llama: Path, token_ids: Tensor
) -> None:
    model = load(tiny_llama)
    batch = extend_batch(token_ids, 0, len(token_ids), shuffled_pages(3))
    output = model.forward(batch, kv_buffers(3, model.shape, 3), capture=(-1, 0, 2))
    oracle = tiny_model("llama")
    with torch.no_grad():
        states = oracle(token_ids.unsqueeze(0), output_hidden_states=True).hidden_states
    assert output.features is not None
    embedded, first, last = output.features.split(64, dim=1)
    assert torch.equal(embedded, states[0][0])
    torch.testing.assert_close(first, states[1][0], rtol=0, atol=1e-4)
    # transformers' last state is normed already, ours is what the norm gets
    normed = model.kernels.rms_norm(last, model.norm, model.config.rms_norm_eps)
    torch.testing.assert_close(normed, states[3][0], rtol=0, atol=1e-4)
    assert torch.equal(normed, output.hidden)


def test_a_bfloat16_cache_rounds_keys_and_values_only(tiny_llama: Path, token_ids: Tensor) -> None:
    model = load(tiny_llama)
    exact = logits_in_chunks(model, token_ids, CHUNKS)
    rounded = logits_in_chunks(model, token_ids, CHUNKS, kv_dtype=torch.bfloat16)
    difference = (exact - rounded).abs().max()
    assert 0 < difference < 0.1
    assert torch.equal(rounded, logits_in_chunks(model, token_ids, [40], kv_dtype=torch.bfloat16))


def test_a_head_over_some_rows_gives_the_logits_of_those_tokens(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([299, 0, 17, 18])
    torch.testing.assert_close(
        model.head_rows(ids)(hidden), model.logits(hidden)[:, ids], rtol=1e-6, atol=1e-6
    )


def test_end_of_sequence_ids_come_from_both_config_files(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    path = directory / "generation_config.json"
    generation = {"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20, "do_sample": True}
    path.write_text(json.dumps(generation))
    config = load(directory).config
    assert config.eos_token_ids == (0, 2)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20.0}
