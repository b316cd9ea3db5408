from pathlib import Path

import pytest
import torch
from tiny_drafter import make_sequence

from truespec.training.answers import Answer, count_bigrams, count_tokens, split_answers
from truespec.training.cache import FeatureCache
from truespec.training.target import Target


def test_sequences_come_back_unchanged_across_shards(target: Target, cache: FeatureCache) -> None:
    assert len(cache) == 3
    for i, got in enumerate(cache):
        wanted = make_sequence(target, 20 + 3 * i, 4 + i, seed=i)
        assert got.answer_start == 4 + i
        assert got.category == "qa"
        for name in ("token_ids", "loss_mask", "taps", "last"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name


def test_a_subset_of_layers_selects_its_columns(cache: FeatureCache, tmp_path: Path) -> None:
    subset = FeatureCache(tmp_path, "train", [2])
    assert subset.layers == [2]
    assert torch.equal(subset[2].taps, cache[2].taps[:, 1:])


def test_a_layer_that_was_not_recorded_is_refused(cache: FeatureCache, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not \[3\]"):
        FeatureCache(tmp_path, "train", [2, 3])


def test_split_holds_out_whole_prompts() -> None:
    answers = [Answer("qa", 0.0, [i % 5], [i]) for i in range(20)]
    dev, train = split_answers(answers, num_dev=5, seed=0)
    assert len(dev) == 8
    assert len(train) == 12
    assert not {tuple(a.prompt_ids) for a in dev} & {tuple(a.prompt_ids) for a in train}


def test_counts_cover_generated_tokens_only() -> None:
    answers = [Answer("qa", 0.0, [9, 9], [1, 2, 1, 2]), Answer("qa", 0.0, [9], [2])]
    assert count_tokens(answers, 10).tolist() == [0, 2, 3, 0, 0, 0, 0, 0, 0, 0]
    pairs, counts = count_bigrams(answers)
    assert pairs.tolist() == [[1, 2], [2, 1]]
    assert counts.tolist() == [2, 1]
