"""EAGLE heads against dense float64 formulas, in every dialect; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_drafters
from dense_drafters import DenseLayer, draft_pool, rms, rows_at, stored, tiny_target
from tiny_drafters import HIDDEN, VOCAB, rounded_copy
from truespec.batch import ModelOutput
from truespec.models.drafters.eagle import load_eagle
from truespec.models.drafters.recurrent import RecurrentDrafter
from truespec.models.fields import CheckpointError
from truespec.models.llama import CausalLM

LENGTH = 21


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_target(tmp_path_factory.mktemp("target"))


def _inputs(num_taps: int) -> tuple[ModelOutput, Tensor]:
    generator = torch.Generator().manual_seed(num_taps)
    hidden = torch.randn(LENGTH, HIDDEN, generator=generator)
    features = torch.randn(LENGTH, num_taps * HIDDEN, generator=generator)
    return ModelOutput(hidden, features), torch.randint(0, VOCAB, (LENGTH,), generator=generator)


def _run(
    drafter: RecurrentDrafter, target: CausalLM, output: ModelOutput, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Carried states and logits of a sequence that is run in three chunks."""
    kv, table = draft_pool(target, drafter.layer.num_layers)
    states = [
        drafter.forward(
            drafter.inputs(output, torch.arange(begin, end)),
            ids[begin:end],
            rows_at(torch.arange(begin, end), table),
            kv,
        )
        for begin, end in ((0, 9), (9, 10), (10, LENGTH))
    ]
    carried = torch.cat(states)
    return carried, drafter.logits(carried)


def _dense_eagle3(
    path: Path, target: CausalLM, output: ModelOutput, ids: Tensor
) -> tuple[Tensor, Tensor]:
    tensors, config = stored(path)
    tensors = {
        n.replace("midlayer.", "layers.0.").removeprefix("model."): t for n, t in tensors.items()
    }
    assert output.features is not None
    features = output.features.double()
    if "input_norm.weight" in tensors:
        features = rms(features, tensors["input_norm.weight"])
    for names in (
        ("aux_norm_low", "aux_norm_mid", "aux_norm_high"),
        ("fc_norm.0", "fc_norm.1", "fc_norm.2"),
    ):
        if f"{names[0]}.weight" in tensors:
            taps = features.chunk(3, dim=1)
            features = torch.cat(
                [
                    rms(tap, tensors[f"{name}.weight"])
                    for tap, name in zip(taps, names, strict=True)
                ],
                1,
            )
    feature = features @ tensors["fc.weight"].T
    first = DenseLayer(tensors, "layers.0.")
    normed = first.norm("hidden_norm", feature)
    embedding = tensors.get("embed_tokens.weight", target.embed_weight.data.double())
    joined = torch.cat([first.norm("input_layernorm", embedding[ids]), normed], dim=1)
    g = first.run_causal(normed if config.get("norm_before_residual") else feature, joined)
    if config["num_hidden_layers"] == 2:
        second = DenseLayer(tensors, "layers.1.")
        g = second.run_causal(g, second.norm("input_layernorm", g))
    out = rms(g, tensors["norm.weight"])
    logits = out @ tensors["lm_head.weight"].T
    return (out if config.get("norm_output") else g), logits


VARIANTS: dict[str, dict[str, object]] = {
    "SpecForge": {},
    "full vocabulary": {"draft_vocab": None},
    "vLLM names": {"first_layer": "layers.0"},
    "Qwen3 norms": {"qk_norm": True, "num_taps": 3},
    "biases": {"qkv_bias": True},
    "two layers": {"num_layers": 2},
    "norm before residual": {"norm_before_residual": True},
    "norm output": {"norm_output": True},
    "norm per tap": {"tap_norms": "fc_norm"},
    "norm per tap, old names": {"tap_norms": "aux_norm"},
    "norm before fc": {"norm_before_fc": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3_equals_dense_formulas(variant: str, target: CausalLM, tmp_path: Path) -> None:
    path = tiny_drafters.eagle3(tmp_path, **VARIANTS[variant])  # type: ignore[arg-type]
    drafter = load_eagle(path, target, 4)
    assert drafter is not None
    output, ids = _inputs(3)
    carried, logits = _run(drafter, target, output, ids)
    expected_carried, expected_logits = _dense_eagle3(path, target, output, ids)
    torch.testing.assert_close(carried.double(), expected_carried, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(logits.double(), expected_logits, rtol=2e-4, atol=2e-4)


def test_draft_ids_are_offset_by_d2t(target: CausalLM, tmp_path: Path) -> None:
    drafter = load_eagle(tiny_drafters.eagle3(tmp_path), target, 4)
    kept = torch.nonzero(load_file(tmp_path / "model.safetensors")["t2d"])[:, 0]
    assert drafter is not None
    assert drafter.target_ids is not None
    assert drafter.target_ids.tolist() == kept.tolist()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("make", [tiny_drafters.eagle3, tiny_drafters.eagle1])
def test_matrices_and_an_own_head_are_rounded(
    make: Callable[[Path], Path], type_name: str, target: CausalLM, tmp_path: Path
) -> None:
    path = make(tmp_path / "a")
    copy = rounded_copy(path, tmp_path / "b", type_name)
    output, ids = _inputs(3)
    found = [load_eagle(path, target, 4, type_name), load_eagle(copy, target, 4)]
    runs = [_run(drafter, target, output, ids) for drafter in found if drafter is not None]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_equals_dense_formulas(bias: bool, target: CausalLM, tmp_path: Path) -> None:
    drafter = load_eagle(tiny_drafters.eagle1(tmp_path, bias=bias), target, 4)
    assert drafter is not None
    output, ids = _inputs(1)
    carried, logits = _run(drafter, target, output, ids)
    tensors, _ = stored(tmp_path)
    embedded = target.embed_weight.data.double()[ids]
    x = torch.cat([embedded, output.hidden.double()], 1) @ tensors["fc.weight"].T
    x = x + tensors.get("fc.bias", torch.zeros(HIDDEN).double())
    expected = DenseLayer(tensors, "layers.0.").run_causal(x, x)
    torch.testing.assert_close(carried.double(), expected, rtol=2e-4, atol=2e-4)
    expected_logits = expected @ target.head_weight.data.double().T
    torch.testing.assert_close(logits.double(), expected_logits, rtol=2e-4, atol=2e-4)


LAYER_IDS = {
    "eagle_aux_hidden_state_layer_ids": ([-1, 0, 1], (-1, 0, 1)),
    "target_layer_ids": ([0, 1, 2], (0, 1, 2)),
    "aux_hidden_state_layer_ids": ([1, 2, 3], (0, 1, 2)),  # names the inputs of layers
}


@pytest.mark.parametrize("field", LAYER_IDS)
def test_each_field_of_layer_ids_has_its_own_convention_and_the_log_says_so(
    field: str, target: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids, captured = LAYER_IDS[field]
    path = tiny_drafters.eagle3(tmp_path, eagle_config=None, **{field: ids})  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        drafter = load_eagle(path, target, 4)
    assert drafter is not None
    assert drafter.capture == captured
    assert f"captures the outputs of target layers {list(captured)}" in caplog.text


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "hidden size": ({"hidden_size": 32}, "hidden_size is 32, the target's is 64"),
    "vocabulary": ({"vocab_size": 50}, "vocab_size is 50, the target's is 48"),
    "layers": ({"num_target_layers": 9}, "num_target_layers is 9, the target's is 3"),
    "layer ids": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        "layers of a target with 3 layers",
    ),
    "number of taps": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
        "fc takes 3 target layers, the config names 2",
    ),
    "no layer ids": ({"eagle_config": None}, "a target of 3 layers has no default"),
    "two conventions": (
        {"target_layer_ids": [0, 1, 2]},
        "eagle_aux_hidden_state_layer_ids and target_layer_ids name different layers",
    ),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8"),
    "windows": ({"layer_types": ["sliding_attention"]}, "layer_types"),
    "soft capping": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
    "draft vocabulary": ({"draft_vocab_size": 39}, "tensor d2t"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_by_name(
    case: str, target: CausalLM, tmp_path: Path
) -> None:
    fields, message = REFUSED[case]
    path = tiny_drafters.eagle3(tmp_path, **fields)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        load_eagle(path, target, 4)


def test_a_tensor_without_a_place_is_refused_by_name(target: CausalLM, tmp_path: Path) -> None:
    path = tiny_drafters.eagle3(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"prefix_gru.weight": torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place in the model: prefix_gru\.weight"):
        load_eagle(path, target, 4)
