"""Fixtures of the training tests, built from tiny_drafter."""

from pathlib import Path

import pytest
import torch
from tiny_drafter import SHAPE, make_sequence, make_target

from truespec.training.cache import FeatureCache, write_shard
from truespec.training.dspark_model import DSparkModel, dims_of
from truespec.training.target import Target


@pytest.fixture
def target() -> Target:
    return make_target()


@pytest.fixture
def model(target: Target) -> DSparkModel:
    torch.manual_seed(1)
    return DSparkModel(SHAPE, dims_of(target))


@pytest.fixture
def cache(target: Target, tmp_path: Path) -> FeatureCache:
    sequences = [make_sequence(target, 20 + 3 * i, 4 + i, seed=i) for i in range(3)]
    write_shard(tmp_path / "train-00000.safetensors", sequences[:2], [0, 2])
    write_shard(tmp_path / "train-00001.safetensors", sequences[2:], [0, 2])
    return FeatureCache(tmp_path, "train")
