"""Block drafters against dense float64 formulas, in every dialect; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_drafters
from dense_drafters import DenseLayer, draft_pool, rms, rows_at, stored, tiny_target
from tiny_drafters import (
    HIDDEN,
    LAYER_FIELDS,
    RANK,
    TARGET_LAYERS,
    VOCAB,
    block_tensors,
    rounded,
    rounded_copy,
    write,
)
from truespec.kernels.api import Weight
from truespec.models.drafters.block import BlockDrafter, load_block_drafter
from truespec.models.fields import CheckpointError
from truespec.models.llama import CausalLM

CONTEXT, ANCHOR = 19, 7
DSPARK_FIELDS: dict[str, object] = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_target(tmp_path_factory.mktemp("target"))


def _hidden(drafter: BlockDrafter, target: CausalLM, features: Tensor) -> Tensor:
    """[G, H] of a block behind a context that is injected in two parts."""
    size = drafter.config.block_size
    kv, table = draft_pool(target, drafter.config.layer.num_layers)
    parts = []
    for begin, end in ((0, 4), (4, CONTEXT)):
        rows = rows_at(torch.arange(begin, end), table)
        parts.append(drafter.context(features[begin:end], rows.positions, rows.out_slots))
    drafter.stack.write_context(parts[0], kv)
    positions = torch.arange(CONTEXT, CONTEXT + size)
    rows = rows_at(positions, table, torch.full((size,), CONTEXT + size))
    return drafter.run(torch.tensor([ANCHOR]), rows, kv, parts[1])[0][0]


def _dense_hidden(
    tensors: dict[str, Tensor], drafter: BlockDrafter, target: CausalLM, features: Tensor, mask: int
) -> Tensor:
    size = drafter.config.block_size
    context = rms(features.double() @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    embedding = target.embed_weight.data.double()
    x = embedding[torch.tensor([ANCHOR] + [mask] * (size - 1))]
    before, block = torch.arange(CONTEXT), torch.arange(CONTEXT, CONTEXT + size)
    sees = torch.ones(size, CONTEXT + size, dtype=torch.bool)
    for index in range(drafter.config.layer.num_layers):
        layer = DenseLayer(tensors, f"layers.{index}.")
        normed = layer.norm("input_layernorm", x)
        past, own = layer.keys_values(context, before), layer.keys_values(normed, block)
        kv = (torch.cat([past[0], own[0]]), torch.cat([past[1], own[1]]))
        x = layer.run(x, normed, block, kv, sees)
    return rms(x, tensors["norm.weight"])


def _spec_forge(directory: Path) -> Path:
    tensors = block_tensors(2, 2, markov="vanilla", confidence=True)
    nested = DSPARK_FIELDS | {
        "mask_token_id": 47,
        "target_layer_ids": [0, 1],
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
    }
    config = LAYER_FIELDS | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 5,
        "num_target_layers": TARGET_LAYERS,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": nested,
    }
    return write(directory, {_spec_forge_name(n): t for n, t in tensors.items()}, config)


def _spec_forge_name(name: str) -> str:
    return f"logit_head.{name}" if "head" in name else f"model.{name}"


def _speculators(directory: Path) -> Path:
    tensors = block_tensors(2, 2, markov="vanilla", confidence=True, draft_vocab=40)
    config = DSPARK_FIELDS | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"verifier": {"name_or_path": "somewhere"}},
        "transformer_layer_config": LAYER_FIELDS | {"num_hidden_layers": 2},
        "draft_vocab_size": 40,
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": 5,
        "mask_token_id": 47,
        "sample_from_anchor": True,
    }
    return write(directory, tensors, config)


def _native(directory: Path) -> Path:
    path = tiny_drafters.dflash(directory)
    tensors = load_file(path / "model.safetensors")
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    save_file(tensors, path / "model.safetensors")
    return path


DIALECTS = {
    "DeepSpec": tiny_drafters.dspark,
    "SpecForge": _spec_forge,
    "speculators": _speculators,
    "z-lab": tiny_drafters.dflash,
    "native": _native,
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_block_hidden_states_equal_dense_formulas(
    dialect: str, target: CausalLM, tmp_path: Path
) -> None:
    path = DIALECTS[dialect](tmp_path)
    drafter = load_block_drafter(path, target)
    assert drafter.config.target_layer_ids == (0, 1)
    assert drafter.config.skip_first_row == (dialect in ("z-lab", "native"))
    features = torch.randn(CONTEXT, 2 * HIDDEN, generator=torch.Generator().manual_seed(2))
    tensors = {
        n.removeprefix("model.")
        .replace("encoder.fc", "fc")
        .replace("encoder.output_norm_enc", "hidden_norm"): t
        for n, t in stored(path)[0].items()
    }
    expected = _dense_hidden(tensors, drafter, target, features, mask=47)
    actual = _hidden(drafter, target, features)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_heads_equal_their_formulas_step_by_step(
    kind: str, target: CausalLM, tmp_path: Path
) -> None:
    drafter = load_block_drafter(tiny_drafters.dspark(tmp_path, markov=kind), target)
    tensors, _ = stored(tmp_path)
    markov, confidence = drafter.markov, drafter.confidence
    assert markov is not None
    assert confidence is not None
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 3, HIDDEN, generator=generator)
    previous = torch.randint(0, VOCAB, (2, 3), generator=generator)
    state, s = markov.initial_state(2), torch.zeros(2, RANK).double()
    w1 = tensors["markov_head.markov_w1.weight"]
    embedded = torch.stack([markov.embed(previous[:, step]) for step in range(3)], dim=1)
    confidences = confidence(hidden, embedded)
    for step in range(3):
        h, e = hidden[:, step].double(), w1[previous[:, step]]
        inner, s = _markov(kind, tensors, h, e, s)
        bias, state = markov.bias(embedded[:, step], hidden[:, step], state)
        expected = inner @ tensors["markov_head.markov_w2.weight"].T
        torch.testing.assert_close(bias.double(), expected, rtol=1e-4, atol=1e-4)
        z = torch.cat([h, e], 1) @ tensors["confidence_head.proj.weight"].T
        c = torch.sigmoid(z + tensors["confidence_head.proj.bias"])[:, 0]
        torch.testing.assert_close(confidences[:, step].double(), c, rtol=1e-4, atol=1e-5)


def _markov(
    kind: str, tensors: dict[str, Tensor], h: Tensor, e: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """What W2 multiplies, and the new state (DSpark, section 3.2)."""
    if kind == "vanilla":
        return e, s
    if kind == "gated":
        weight, bias = (tensors[f"markov_head.gate_proj.{part}"] for part in ("weight", "bias"))
        return torch.sigmoid(torch.cat([h, e], 1) @ weight.T + bias) * e, s
    weight, bias = (tensors[f"markov_head.joint_proj.{part}"] for part in ("weight", "bias"))
    g, c, o = (torch.cat([s, e, h], 1) @ weight.T + bias).chunk(3, dim=1)
    s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
    return torch.tanh(o), s


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_matrices_are_rounded_and_the_sequential_heads_are_not(
    kind: str,
    type_name: str,
    target: CausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny_drafters, "RANK", 32)  # so that their rows are whole blocks
    path = tiny_drafters.dspark(tmp_path / "a", markov=kind)
    exact = load_block_drafter(path, target)
    drafter = load_block_drafter(path, target, weight_type=type_name)
    copy = load_block_drafter(rounded_copy(path, tmp_path / "b", type_name), target)
    features = torch.randn(CONTEXT, 2 * HIDDEN, generator=torch.Generator().manual_seed(2))
    hidden = _hidden(drafter, target, features)
    assert torch.equal(hidden, _hidden(copy, target, features))
    assert not torch.equal(hidden, _hidden(exact, target, features))
    assert drafter.head is target.head
    assert torch.equal(_sequential(drafter, hidden), _sequential(exact, hidden))


def _sequential(drafter: BlockDrafter, hidden: Tensor) -> Tensor:
    """[rows, V + 1] Markov biases of the first step and confidences behind token 5."""
    markov, confidence = drafter.markov, drafter.confidence
    assert markov is not None
    assert confidence is not None
    embedded = markov.embed(torch.full((len(hidden),), 5))
    bias, _ = markov.bias(embedded, hidden, markov.initial_state(len(hidden)))
    sure = confidence(hidden.unsqueeze(1), embedded.unsqueeze(1))
    return torch.cat([bias, sure], dim=1)


def test_the_targets_rows_are_rounded_in_a_head_over_some_of_them(
    target: CausalLM, tmp_path: Path
) -> None:
    drafter = load_block_drafter(_speculators(tmp_path), target, weight_type="Q4_1")
    assert drafter.target_ids is not None
    values = rounded(target.head_weight.data[drafter.target_ids], "Q4_1")
    expected = target.kernels.linear(Weight(values, "F32", (len(values), HIDDEN)))
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4))
    assert torch.equal(drafter.head(x), expected(x))


def test_the_row_rule_follows_classes_and_fields(target: CausalLM, tmp_path: Path) -> None:
    """A head-less drafter of the DSpark classes keeps DSpark's rule: row 0 is a draft."""
    fields = {"architectures": ["Qwen3DSparkModel"]}
    drafter = load_block_drafter(tiny_drafters.dflash(tmp_path / "a", **fields), target)  # type: ignore[arg-type]
    assert not drafter.config.skip_first_row
    assert drafter.config.num_drafts == 6
    path = tiny_drafters.dspark(tmp_path / "b", sample_from_anchor=False)
    assert load_block_drafter(path, target).config.num_drafts == 4
    assert load_block_drafter(tiny_drafters.dflash(tmp_path / "c"), target).config.num_drafts == 5


def test_a_shorter_block_than_trained_is_taken_and_a_longer_one_refused(
    target: CausalLM, tmp_path: Path
) -> None:
    path = tiny_drafters.dspark(tmp_path)
    assert load_block_drafter(path, target, 3).config.num_drafts == 3
    with pytest.raises(CheckpointError, match="asked for is 6, the drafter was trained for 5"):
        load_block_drafter(path, target, 6)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "hidden size": ({"hidden_size": 32}, "hidden_size is 32, the target's is 64"),
    "vocabulary": ({"vocab_size": 50}, "vocab_size is 50, the target's is 48"),
    "target layers": ({"num_target_layers": 9}, "num_target_layers is 9, the target's is 3"),
    "last layer": ({"target_layer_ids": [0, 2]}, r"target_layer_ids is \[0, 2\]"),
    "mask": ({"mask_token_id": 48}, "mask_token_id is 48, the target has 48 ids"),
    "markov type": ({"markov_head_type": "tree"}, "markov_head_type is 'tree'"),
    "windows": ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    "projector": ({"projector_type": "domino"}, "projector_type is 'domino'"),
    "convolution": ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
    "selector": ({"selector_rank": 8}, "selector_rank is 8"),
    "soft capping": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
    "experts": ({"n_routed_experts": 8}, "n_routed_experts is 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_drafter_that_does_not_fit_is_refused_by_name(
    case: str, target: CausalLM, tmp_path: Path
) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load_block_drafter(tiny_drafters.dspark(tmp_path, **fields), target)  # type: ignore[arg-type]


def test_a_drafter_bundled_with_deepseek_v4_is_refused_by_name(
    target: CausalLM, tmp_path: Path
) -> None:
    config = {"dspark_block_size": 5, "dspark_target_layer_ids": [0, 1, 2], "vocab_size": VOCAB}
    write(tmp_path, {"mtp.0.main_proj.weight": torch.zeros(2, 2)}, config)
    with pytest.raises(CheckpointError, match="bundled with DeepSeek-V4"):
        load_block_drafter(tmp_path, target)


def test_a_tensor_without_a_place_is_refused_by_name(target: CausalLM, tmp_path: Path) -> None:
    path = tiny_drafters.dflash(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"embed_proj.weight": torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place in the model: embed_proj\.weight"):
        load_block_drafter(path, target)
