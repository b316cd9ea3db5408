from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_dspark import make_task

from truespec.training import loop
from truespec.training.cache import FeatureCache
from truespec.training.config import LoopConfig
from truespec.training.rounding import round_q4_1, rounded
from truespec.training.start import measure_tap_scale
from truespec.training.target import Target

Q4_1 = gguf.GGMLQuantizationType.Q4_1


def as_the_library_rounds(stored: torch.Tensor) -> torch.Tensor:
    blocks = gguf.quants.quantize(stored.float().numpy(), Q4_1)
    return torch.from_numpy(gguf.quants.dequantize(blocks, Q4_1))


def test_rounding_is_that_of_the_gguf_library() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(40, 96, generator=generator) * torch.logspace(-4, 2, 40).unsqueeze(1)
    weight[3], weight[4, :32], weight[5, 32:64] = 0.0, 1.25, -0.5
    weight[6] = torch.from_numpy(np.arange(96, dtype=np.float32))  # values between two codes
    assert torch.equal(round_q4_1(weight), as_the_library_rounds(weight.bfloat16()))


def test_while_it_lasts_matrices_are_what_serving_reads_of_the_export(
    target: Target, cache: FeatureCache, tmp_path: Path
) -> None:
    task = make_task(target, cache)
    task.model.tap_scale.copy_(measure_tap_scale(cache))
    task.export(tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    exact = {name: p.clone() for name, p in task.model.named_parameters()}
    with rounded(task.model, "q4_1"):
        inside = {name: p.clone() for name, p in task.model.named_parameters()}
    changed = {name for name, p in inside.items() if not torch.equal(p, exact[name])}
    assert changed == {n for n, p in exact.items() if "proj.weight" in n or n == "fc.weight"} - {
        "confidence_head.proj.weight"
    }
    for name in changed - {"fc.weight"}:
        assert torch.equal(inside[name], as_the_library_rounds(tensors[name])), name
    served = as_the_library_rounds(tensors["fc.weight"])
    torch.testing.assert_close(inside["fc.weight"] / task.model.tap_scale, served)
    assert all(torch.equal(p, exact[name]) for name, p in task.model.named_parameters())
    with rounded(task.model, "none"):
        assert all(torch.equal(p, exact[name]) for name, p in task.model.named_parameters())


def test_a_step_moves_the_exact_weights_by_gradients_at_the_rounded_ones(
    target: Target, cache: FeatureCache
) -> None:
    task, same = make_task(target, cache), make_task(target, cache)
    with rounded(same.model, "q4_1"):
        loss, _ = same.loss(0, 0.0)
        wanted = torch.autograd.grad(loss, same.model.layers[0].mlp.up_proj.weight)[0]
    before = task.model.layers[0].mlp.up_proj.weight.detach().clone()
    config = LoopConfig(num_steps=4, num_threads=1, muon_min_dim=16, rounding="q4_1", grad_clip=1e9)
    loop.train_step(task, loop.start_state(task, config), config)
    weight = task.model.layers[0].mlp.up_proj.weight
    assert weight.grad is not None
    assert torch.equal(weight.grad, wanted)
    moved = (weight.detach() - before).abs().max()
    assert 0 < moved < 0.1 * (round_q4_1(before) - before).abs().max() + 1e-2
    assert not torch.equal(weight.detach(), round_q4_1(weight.detach()))


def test_a_rounding_that_is_not_known_is_refused(
    target: Target, cache: FeatureCache, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="rounding is q3_k, expected none or q4_1"):
        loop.train(make_task(target, cache), tmp_path / "run", LoopConfig(rounding="q3_k"))
