"""Converted directories against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged import logits_in_chunks
from tiny import Option, tiny_model
from tiny_gguf import write_gguf
from truespec.convert import convert
from truespec.kernels.reference import ReferenceKernels
from truespec.models.fields import CheckpointError
from truespec.models.loader import load_model
from truespec.tokenizer.backend import load_tokenizer

TOKEN_IDS = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_a_converted_model_with_our_logits(
    dtype: str, family: str, options: dict[str, Option], tmp_path: Path
) -> None:
    path, directory = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(tiny_model(family, intermediate_size=128, **options), path, "Q8_0")
    convert(path, directory, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(TOKEN_IDS.unsqueeze(0)).logits[0]
    ours = load_model(directory, ReferenceKernels())
    assert ours.config.dtype == dtype
    logits = logits_in_chunks(ours, TOKEN_IDS, [20, 10])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    if dtype == "float32":
        original = logits_in_chunks(load_model(path, ReferenceKernels()), TOKEN_IDS, [20, 10])
        assert torch.equal(logits, original)


def test_the_tokenizer_and_its_template_come_along(tmp_path: Path) -> None:
    convert_tokenizer_of_packaged_model(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer("smollm2")
    chat = [{"role": "user", "content": "  42 + 1?"}]
    for text in ("  42", "Hello <|im_end|>\n\n  wörld 12345", ""):
        assert theirs.encode(text) == ours.encode(text) == load_tokenizer(tmp_path).encode(text)
    rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.apply_chat_template(chat)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)


def convert_tokenizer_of_packaged_model(directory: Path) -> None:
    """The whole conversion; it takes seconds, so that one test uses it."""
    convert("smollm2", directory, "bfloat16")
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert load_model(directory, ReferenceKernels()).config.eos_token_ids == (2,)


def test_llama3_divisors_become_their_parameters(tmp_path: Path) -> None:
    rope: dict[str, Option] = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=rope)
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(model, tmp_path / "model.gguf", rope_divisors=divisors)
    convert(tmp_path / "model.gguf", tmp_path / "out", "float32")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters
    assert written == pytest.approx(rope)

    divisors[3] *= 2
    write_gguf(model, tmp_path / "odd.gguf", rope_divisors=divisors)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        convert(tmp_path / "odd.gguf", tmp_path / "odd", "float32")
    assert not (tmp_path / "odd").exists()


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="int8"):
        convert(tmp_path / "model.gguf", tmp_path / "out", "int8")
