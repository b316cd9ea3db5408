import gzip
import json
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from tiny_drafter import make_sequence
from torch import Tensor

from truespec.training.answers import Answer, count_bigrams, count_tokens, split_answers
from truespec.training.cache import FeatureCache
from truespec.training.collect import collect_features
from truespec.training.config import Collecting
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


class CountingTarget:
    """Features that hold each token's id and position."""

    def features(self, token_ids: Seq[int], layers: Seq[int]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(token_ids, dtype=torch.float32)[:, None]
        return ids[:, None, :] + torch.tensor(layers)[None, :, None], ids


def test_collecting_writes_every_answer_once_and_continues(tmp_path: Path) -> None:
    answers = [
        {"category": "qa", "temperature": i % 2, "prompt_ids": [i, 1], "output_ids": [2, 3, i]}
        for i in range(9)
    ]
    with gzip.open(tmp_path / "answers.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps(answer) + "\n" for answer in answers)
    options = Collecting(num_dev=2, shard_size=3)
    for _ in range(2):  # the second finds everything done
        collect_features(
            CountingTarget(), tmp_path / "answers.jsonl.gz", tmp_path / "cache", [0, 4], options
        )
    dev, train = (FeatureCache(tmp_path / "cache", split) for split in ("dev", "train"))
    assert (len(dev), len(train)) == (2, 7)
    assert sorted(int(s.token_ids[0]) for s in [*dev, *train]) == list(range(9))
    for sequence in train:
        i = int(sequence.token_ids[0])
        assert sequence.token_ids.tolist() == [i, 1, 2, 3, i]
        assert sequence.loss_mask.tolist() == [0, 0, 1, 1, 1]
        assert sequence.temperature == i % 2
        assert sequence.taps[:, 1, 0].tolist() == [i + 4, 5, 6, 7, i + 4]
