import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_drafter import LAYERS, SHAPE, VOCAB

from truespec.training import loop
from truespec.training.cache import FeatureCache
from truespec.training.config import Batching, DSparkLoss, LoopConfig
from truespec.training.dspark import DSparkTask
from truespec.training.dspark_model import DSparkModel, dims_of
from truespec.training.start import (
    choose_draft_vocab,
    measure_tap_scale,
    start_markov_head,
)
from truespec.training.target import Target

BATCHING = Batching(num_sequences=2, anchors_per_sequence=8)
VOCAB_IDS = torch.arange(SHAPE.draft_vocab_size)


def make_task(target: Target, cache: FeatureCache) -> DSparkTask:
    torch.manual_seed(2)
    model = DSparkModel(SHAPE, dims_of(target))
    loss = DSparkLoss(ce_only_fraction=0.8)
    return DSparkTask(model, target, VOCAB_IDS, cache, cache, batching=BATCHING, loss=loss)


def test_few_sequences_are_learned_by_heart(
    target: Target, cache: FeatureCache, tmp_path: Path
) -> None:
    task = make_task(target, cache)
    config = LoopConfig(num_steps=250, learning_rate=1.2e-2, muon_min_dim=16, measure_every=250)
    loop.train(task, tmp_path / "run", config)
    history = [json.loads(x) for x in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    # Answers of 16, 18 and 20 tokens in rounds of at most 5: 4 rounds each for 15, 17, 19 tokens.
    best = (15 + 17 + 19) / (3 + 4 + 4)
    assert history[-1]["dev/greedy"] > 0.9 * best
    assert (tmp_path / "run/curves.png").exists()


def test_a_resumed_run_ends_with_identical_weights(
    target: Target, cache: FeatureCache, tmp_path: Path
) -> None:
    config = LoopConfig(num_steps=6, muon_min_dim=16, measure_every=3)
    whole, first, second = (make_task(target, cache) for _ in range(3))
    end = loop.train(whole, tmp_path / "whole", config)
    state = loop.start_state(first, config)
    for _ in range(3):
        loop.train_step(first, state, config)
    (tmp_path / "parts").mkdir()
    loop.save_state(first, state, tmp_path / "parts/state.pt")
    resumed = loop.train(second, tmp_path / "parts", config)
    assert resumed.step == end.step == 6
    pairs = zip(whole.model.state_dict().items(), second.model.state_dict().values(), strict=True)
    for (name, wanted), got in pairs:
        assert torch.equal(wanted, got), name
    averages = zip(end.average.parameters(), resumed.average.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in averages)


def test_export_has_every_tensor_once_and_folds_the_tap_scale(
    target: Target, cache: FeatureCache, tmp_path: Path
) -> None:
    task = make_task(target, cache)
    task.model.tap_scale.copy_(measure_tap_scale(cache))
    for _ in range(2):  # the second replaces the first
        task.export(tmp_path / "out")
    assert [p.name for p in tmp_path.glob("out*")] == ["out"]
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert set(tensors) == {n for n, _ in task.model.named_parameters()} | {"d2t"}
    folded = (task.model.fc.weight / task.model.tap_scale).bfloat16()
    assert torch.equal(tensors["fc.weight"], folded)
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCAB, 4)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (32, 32)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["target_layer_ids"] == [0, 2]
    assert config["num_target_layers"] == LAYERS
    assert config["block_size"] == 4
    assert config["mask_token_id"] is None


def test_draft_vocab_is_the_most_frequent_ids_and_d2t_holds_offsets(
    target: Target, cache: FeatureCache, tmp_path: Path
) -> None:
    counts = np.array([5, 0, 7, 7, 1])
    vocab = choose_draft_vocab(counts, 3)
    assert vocab.tolist() == [0, 2, 3]
    task = make_task(target, cache)
    task.draft_vocab = torch.arange(5, 5 + SHAPE.draft_vocab_size)
    task.export(tmp_path / "out")
    d2t = load_file(tmp_path / "out/model.safetensors")["d2t"]
    assert torch.equal(torch.arange(len(d2t)) + d2t, task.draft_vocab)


def test_markov_start_prefers_the_pairs_it_saw(target: Target, model: DSparkModel) -> None:
    pairs = np.array([[50, 3], [50, 4], [7, 4], [8, 9]])
    start_markov_head(model, VOCAB_IDS, pairs, np.array([30, 2, 30, 30]))
    bias = model.markov_head.markov_w2(model.markov_head.markov_w1(torch.tensor([50, 7])))
    assert bias.argmax(-1).tolist() == [3, 4]


def test_a_batch_without_reachable_labels_still_trains_the_confidence(
    target: Target, cache: FeatureCache
) -> None:
    task = make_task(target, cache)
    task.draft_vocab = torch.arange(13, VOCAB)
    loss, metrics = task.loss(0, 0.0)
    assert torch.isfinite(loss)
    assert metrics["tau"] == pytest.approx(1.0, abs=3.0)
