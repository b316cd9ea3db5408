"""A full disk ends a run with a message that says so, and leaves what was finished."""

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import SafetensorError
from tiny_drafter import make_sequence

from truespec.training import cache as cache_module
from truespec.training.answers import Answer, append_answers
from truespec.training.cache import FeatureCache, write_shard
from truespec.training.config import Collecting
from truespec.training.disk import naming_a_full_disk
from truespec.training.stages import check_cache_size
from truespec.training.target import Target


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def set_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free))


def fail_like_safetensors(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


def test_a_shard_that_does_not_fit_is_an_error_of_the_disk(
    target: Target, cache: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "save_file", fail_like_safetensors)
    with pytest.raises(OSError, match="the disk is full; what was finished is kept") as caught:
        write_shard(tmp_path / "train-00009.safetensors", [make_sequence(target, 9, 3, 0)], [0, 2])
    assert caught.value.errno == errno.ENOSPC
    assert len(FeatureCache(tmp_path, "train")) == len(cache)


def test_torch_fails_in_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 0)
    with pytest.raises(OSError, match="the disk is full"), naming_a_full_disk(tmp_path / "a"):
        raise RuntimeError("unexpected pos 576 vs 534")
    set_free(monkeypatch, 1 << 30)
    with pytest.raises(RuntimeError, match="shapes"), naming_a_full_disk(tmp_path / "a"):
        raise RuntimeError("shapes do not fit")


def test_features_that_would_not_fit_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = [Answer("qa", 0.0, [i], list(range(99))) for i in range(10)]
    append_answers(tmp_path / "a.gz", answers)
    wanted = 10 * 100 * (3 * 64 * 2 + 5)
    arguments = (tmp_path / "a.gz", tmp_path / "cache", (0, 1), 64, Collecting(num_dev=2))
    set_free(monkeypatch, wanted)
    check_cache_size(*arguments)
    set_free(monkeypatch, wanted - 1)
    with pytest.raises(OSError, match=r"no room for the features.*--max-train"):
        check_cache_size(*arguments)
    torch.save(torch.zeros(100), tmp_path / "cache" / "dev-00000.safetensors")
    check_cache_size(*arguments)
    assert capfd.readouterr().err.count("2 + 8 answers, 1000 tokens") == 3
