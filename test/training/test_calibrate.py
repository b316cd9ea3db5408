from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_drafter import SHAPE, make_sequence

from truespec.training.blocks import all_anchors, make_batch
from truespec.training.calibrate import calibration_error, fit_head, fit_temperatures
from truespec.training.dspark_model import DSparkModel, forward_blocks
from truespec.training.export import export_block, read_dspark
from truespec.training.measure import draft_greedily
from truespec.training.shrink import shrink_block
from truespec.training.target import Target


def test_fit_finds_the_temperatures_that_made_the_data() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0.5, 2.0, (40_000, 2))
    true = np.array([2.0, 0.5])
    accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits / true)), axis=1)
    temperatures, before, after = fit_temperatures(logits, accepted.astype(bool))
    assert temperatures == pytest.approx(true, rel=0.15)
    assert all(a < 0.02 and a < b for a, b in zip(after, before, strict=True))


def test_calibration_error_is_the_gap_weighted_by_bin_size() -> None:
    predicted = np.array([0.9, 0.9, 0.9, 0.1])
    assert calibration_error(predicted, np.array([1, 1, 0, 0])) == pytest.approx((0.7 + 0.1) / 4)


def test_a_checkpoint_read_back_drafts_the_same(
    target: Target, model: DSparkModel, tmp_path: Path
) -> None:
    model.tap_scale.fill_(2.0)
    vocab = torch.arange(3, 3 + SHAPE.draft_vocab_size)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    export_block(model, target, vocab, tmp_path / "out")
    again, vocab_again = read_dspark(tmp_path / "out", target)
    assert torch.equal(vocab_again, vocab)
    assert again.shape == model.shape
    sequence = make_sequence(target, 14, 4, seed=3)
    batch = make_batch([sequence], [all_anchors(sequence)], 4)
    results = [
        draft_greedily(m, batch, forward_blocks(m, batch, target.embedding)[0], head, vocab)
        for m in (model, again)
        for head in [target.head[vocab]]
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-4)


def test_a_shrunk_drafter_keeps_its_most_frequent_ids_and_their_rows(
    target: Target, model: DSparkModel, tmp_path: Path
) -> None:
    vocab = torch.arange(3, 3 + SHAPE.draft_vocab_size)
    export_block(model, target, vocab, tmp_path / "whole")
    counts = np.zeros(61, np.int64)
    counts[[0, 5, 9, 30]] = 7, 1, 3, 2  # id 0 is none of the drafter's
    shrink_block(tmp_path / "whole", tmp_path / "small", counts, 3)
    small, ids = read_dspark(tmp_path / "small", target)
    assert ids.tolist() == [5, 9, 30]
    assert small.shape.draft_vocab_size == 3
    whole, _ = read_dspark(tmp_path / "whole", target)
    for name, parameter in whole.named_parameters():
        kept = parameter[ids - 3] if name == "markov_head.markov_w2.weight" else parameter
        assert torch.equal(kept, small.get_parameter(name)), name
    with pytest.raises(ValueError, match="--draft-vocab-size is 49, the drafter has 48 ids"):
        shrink_block(tmp_path / "whole", tmp_path / "small", counts, 49)


def test_fitted_head_gives_the_acceptance_of_reached_drafts(model: DSparkModel) -> None:
    generator = torch.Generator().manual_seed(0)
    width = model.confidence_head.proj.in_features
    inputs = torch.randn(4000, 4, width, generator=generator)
    rate = torch.sigmoid(2.0 * inputs[..., 3] + 0.5)
    accepted = (torch.rand(4000, 4, generator=generator) < rate).cumprod(-1).bool()
    fit_head(model, inputs, accepted)
    weight = model.confidence_head.proj.weight[0]
    assert float(weight[3]) == pytest.approx(2.0, abs=0.25)
    assert float(weight[4:].abs().max()) < 0.15
    assert float(model.confidence_head.proj.bias) == pytest.approx(0.5, abs=0.1)
