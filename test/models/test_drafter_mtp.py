"""MTP heads against dense float64 formulas, in every dialect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_drafters
from dense_drafters import DenseLayer, draft_pool, rms, rows_at, stored, tiny_target
from tiny_drafters import HIDDEN, MTP_NAMES, TARGET_LAYERS, VOCAB, rounded_copy
from truespec.batch import ModelOutput
from truespec.models.drafters.mtp import MtpHead, load_mtp
from truespec.models.fields import CheckpointError
from truespec.models.llama import CausalLM

LENGTH = 19


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("family", MTP_NAMES)
def test_heads_equal_dense_formulas(family: str, target: CausalLM, tmp_path: Path) -> None:
    path = tiny_drafters.mtp(tmp_path, family, num_heads=2)
    found = load_mtp(path, target, 4)
    assert found is not None
    assert len(found.heads) == 2
    assert found.is_chained == (family != "mimo_v2")
    output, ids = _inputs()
    for index, head in enumerate(found.heads):
        carried, logits = _run(head, target, output, ids)
        expected = _dense(path, family, index, target, output, ids)
        torch.testing.assert_close(carried.double(), expected[0], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(logits.double(), expected[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", MTP_NAMES)
def test_matrices_and_own_heads_are_rounded_and_embeddings_are_not(
    family: str, type_name: str, target: CausalLM, tmp_path: Path
) -> None:
    path = tiny_drafters.mtp(tmp_path / "a", family, num_heads=2)
    found = load_mtp(path, target, 4, type_name)
    copy = load_mtp(rounded_copy(path, tmp_path / "b", type_name), target, 4)
    assert found is not None
    assert copy is not None
    output, ids = _inputs()
    for head, same in zip(found.heads, copy.heads, strict=True):
        runs = [_run(each, target, output, ids) for each in (head, same)]
        assert torch.equal(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])


def _inputs() -> tuple[ModelOutput, Tensor]:
    generator = torch.Generator().manual_seed(1)
    output = ModelOutput(
        torch.randn(LENGTH, HIDDEN, generator=generator),
        torch.randn(LENGTH, HIDDEN, generator=generator),
    )
    return output, torch.randint(0, VOCAB, (LENGTH,), generator=generator)


def _run(
    head: MtpHead, target: CausalLM, output: ModelOutput, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Carried states and logits of a sequence."""
    kv, table = draft_pool(target, 1)
    rows = rows_at(torch.arange(LENGTH), table)
    carried = head.forward(head.inputs(output, torch.arange(LENGTH)), ids, rows, kv)
    return carried, head.logits(carried)


def _dense(
    path: Path,
    family: str,
    index: int,
    target: CausalLM,
    output: ModelOutput,
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carried states and logits of head `index`, with what each family is known to do."""
    prefix, join, norms, final, block = MTP_NAMES[family]
    number = index + (TARGET_LAYERS if family in ("step", "deepseek") else 0)
    start = prefix.format(number)
    tensors = {n.removeprefix(start): t for n, t in stored(path)[0].items() if n.startswith(start)}
    if family == "step":  # its norms multiply with 1 + w
        tensors = {n: t + 1 if "norm" in n else t for n, t in tensors.items()}
    if family == "mimo_v2":
        tensors["post_attention_layernorm.weight"] = tensors["pre_mlp_layernorm.weight"]
    embedding = tensors.get("embed_tokens.weight", target.embed_weight.data.double())
    embedded = embedding[ids]
    assert output.features is not None
    hidden = (output.features if family == "step" else output.hidden).double()
    if family == "mimo":
        embedded = embedded * (torch.arange(len(ids)) > 0)[:, None]
    pair = [
        rms(embedded, tensors[f"{norms[0]}.weight"]),
        rms(hidden, tensors[f"{norms[1]}.weight"]),
    ]
    if family == "mimo":
        pair.reverse()
    x = torch.cat(pair, 1) @ tensors[f"{join}.weight"].T
    layer = DenseLayer(tensors, block)
    out = layer.run_causal(x, layer.norm("input_layernorm", x))
    normed = rms(out, tensors[f"{final}.weight"])
    names = {"step": "shared_head.output.weight", "deepseek": "shared_head.head.weight"}
    head = tensors[names[family]] if family in names else target.head_weight.data.double()
    return (out if family == "step" else normed), normed @ head.T


def test_the_targets_own_tensors_beside_the_heads_are_left_alone(
    target: CausalLM, tmp_path: Path
) -> None:
    path = tiny_drafters.mtp(tmp_path, "deepseek")
    tensors = load_file(path / "model.safetensors")
    others = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    tensors |= {name: torch.zeros(2) for name in (*others, "model.layers.2.mlp.up_proj.weight")}
    save_file(tensors, path / "model.safetensors")
    found = load_mtp(path, target, 4)
    assert found is not None
    assert len(found.heads) == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "model.mtp.layers.0.self_attn.sink",
            "no place in the model: model.mtp.layers.0.self_attn.sink",
        ),
        ("model.mtp.layers.2.enorm.weight", "no place in the model"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    extra: str, message: str, target: CausalLM, tmp_path: Path
) -> None:
    path = tiny_drafters.mtp(tmp_path, "mimo_v2")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {extra: torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_mtp(path, target, 4)


def test_heads_behind_another_number_of_target_layers_are_refused(
    target: CausalLM, tmp_path: Path
) -> None:
    path = tiny_drafters.mtp(tmp_path, "step")
    tensors = load_file(path / "model.safetensors")
    moved = {name.replace("layers.3.", "layers.5."): t for name, t in tensors.items()}
    save_file(moved, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not follow the target's 3 layers"):
        load_mtp(path, target, 4)


def test_attention_windows_are_refused_by_name(target: CausalLM, tmp_path: Path) -> None:
    path = tiny_drafters.mtp(tmp_path, "mimo_v2", hybrid_layer_pattern=1)
    with pytest.raises(CheckpointError, match="hybrid_layer_pattern is 1"):
        load_mtp(path, target, 4)


def test_draft_ids_are_offset_by_d2t_and_logits_are_of_those_ids(
    target: CausalLM, tmp_path: Path
) -> None:
    found = load_mtp(tiny_drafters.mtp(tmp_path, "mimo_v2", num_heads=2, draft_vocab=30), target, 4)
    assert found is not None
    offsets = load_file(tmp_path / "model.safetensors")["d2t"]
    ids = torch.arange(30) + offsets
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    for head in found.heads:
        assert head.target_ids is not None
        assert torch.equal(head.target_ids, ids)
        wanted = states.double() @ target.head_weight.data.double()[ids].T
        torch.testing.assert_close(head.logits(states).double(), wanted, rtol=2e-4, atol=2e-4)
