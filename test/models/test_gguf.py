"""GGUF files against transformers on the dequantised weights, and their refusals."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from paged import logits_in_chunks
from tiny import Option, tiny_model
from tiny_gguf import MetadataValue, write_gguf
from truespec.kernels.api import KernelSet
from truespec.kernels.reference import ReferenceKernels
from truespec.models.fields import CheckpointError
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model
from truespec.utils.gguf_file import GGUFFile

CHUNKS = [9, 1, 14]
WIDE: dict[str, Option] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return torch.randint(0, 300, (sum(CHUNKS),), generator=torch.Generator().manual_seed(5))


def load(path: Path) -> CausalLM:
    return load_model(path, ReferenceKernels())


def assert_equals_oracle(model: CausalLM, oracle: torch.nn.Module, token_ids: Tensor) -> None:
    with torch.no_grad():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    logits = logits_in_chunks(model, token_ids, CHUNKS)
    # fp32 sums in another order: the bound follows the size of the logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * max(5, expected.abs().max()))
    assert expected.std() > 0.5


@pytest.mark.parametrize("type_name", TYPES)
def test_every_block_type_is_computed_with_its_exact_values(
    type_name: str, tmp_path: Path, token_ids: Tensor, kernels: KernelSet
) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(tiny_model("llama", num_hidden_layers=2, **WIDE), path, type_name)
    model = load_model(path, kernels)
    assert model.embed_weight.type == type_name
    assert_equals_oracle(model, oracle, token_ids)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32, "hidden_size": 96}),
    ],
)
def test_every_family_can_come_from_gguf(
    family: str, options: dict[str, Option], tmp_path: Path, token_ids: Tensor
) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(tiny_model(family, intermediate_size=128, **options), path, "Q8_0")
    assert_equals_oracle(load(path), oracle, token_ids)


def test_the_rope_scaling_of_llama3_comes_as_divisors(tmp_path: Path, token_ids: Tensor) -> None:
    rope: dict[str, Option] = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model("llama", rope_parameters=rope)
    plain = 500.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 7  # the scaling acts
    path = tmp_path / "model.gguf"
    oracle = write_gguf(model, path, rope_divisors=divisors)
    assert_equals_oracle(load(path), oracle, token_ids)


def test_yarn_is_read_from_metadata(tmp_path: Path, token_ids: Tensor) -> None:
    rope: dict[str, Option] = {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = tmp_path / "model.gguf"
    extra: dict[str, MetadataValue] = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 64,
    }
    oracle = write_gguf(tiny_model("qwen3", rope_parameters=rope), path, extra=extra)
    assert_equals_oracle(load(path), oracle, token_ids)


def test_end_of_sequence_ids_are_eos_and_eot(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, extra={"tokenizer.ggml.eot_token_id": 0})
    assert load(path).config.eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("named", "extra"),
    [
        ("attention.sliding_window", {"llama.attention.sliding_window": 64}),
        ("expert_count", {"llama.expert_count": 8}),
        ("rope.dimension_count", {"llama.rope.dimension_count": 8}),
        ("attention.value_length", {"llama.attention.value_length": 8}),
        ("rope.scaling.type", {"llama.rope.scaling.type": "longrope"}),
        ("block_count", {"llama.block_count": "three"}),
    ],
)
def test_a_key_that_is_not_built_is_refused_by_name(
    named: str, extra: dict[str, MetadataValue], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, extra=extra)
    with pytest.raises(CheckpointError, match=named):
        load(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, without=("llama.embedding_length",))
    with pytest.raises(CheckpointError, match="embedding_length is missing"):
        load(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'mamba'"):
        load(tmp_path / "model.gguf")


def test_a_layer_too_many_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, extra={"llama.block_count": 2})
    with pytest.raises(CheckpointError, match=r"9 tensors have no place .*blk\.2\.attn_k\.weight"):
        load(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model at all")
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        load(tmp_path / "model.gguf")


def test_metadata_equals_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path)
    library, ours = gguf.GGUFReader(path), GGUFFile(path)
    assert list(ours.fields) == list(library.fields)
    for key, field in library.fields.items():
        assert ours.get(key) == field.contents()
    assert ours.get("no.such.key") is None
    assert [t.name for t in ours.tensors] == [t.name for t in library.tensors]


def test_dropped_pages_take_no_memory_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path)
    file = GGUFFile(path)
    before = [tensor.data.copy() for tensor in file.tensors]
    assert resident_kb(path) > 0
    file.drop_pages()
    assert resident_kb(path) == 0
    assert all(np.array_equal(a, t.data) for a, t in zip(before, file.tensors, strict=True))


def resident_kb(path: Path) -> int:
    """Memory that this process's mappings of a file take."""
    sections = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    sizes = (re.search(r"^Rss: +(\d+)", s, re.M) for s in sections if str(path) in s)
    return sum(int(size[1]) for size in sizes if size)


def default_model_oracle(path: Path) -> torch.nn.Module:
    """transformers' Llama with the dequantised weights of the packaged model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFFile(path)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    tensors = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    for name in model.state_dict():
        values = tensors[
            names.get_name(name.replace("lm_head", "model.embed_tokens"), (".weight",))
        ]
        if "q_proj" in name or "k_proj" in name:
            pairs = values.view(-1, 32, 2, 576)  # [head, pair, side]
            values = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).view_as(values)
        state[name] = values
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_the_packaged_model_equals_transformers_on_its_dequantised_weights(
    compiled_kernels: KernelSet,
) -> None:
    from truespec.utils.model_path import resolve_model_path

    path = resolve_model_path("smollm2")
    token_ids = torch.tensor(
        [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198, 1, 520, 9531, 198]
    )
    with torch.no_grad():
        expected = default_model_oracle(path)(token_ids.unsqueeze(0)).logits[0]
    for kernels in (ReferenceKernels(), compiled_kernels):
        model = load_model(path, kernels)
        assert (model.config.eos_token_ids, model.config.context_length) == ((2,), 8192)
        logits = logits_in_chunks(model, token_ids, [8, 1, 6])
        torch.testing.assert_close(logits, expected, rtol=0, atol=3e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
