"""The feature stage: run the target over recorded answers and write the feature cache."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import track
from torch import Tensor

from .answers import Answer, order_answers, read_answers, split_answers
from .cache import FeatureSequence, write_shard
from .config import Collecting


class FeatureSource(Protocol):
    """What the stage needs of `truespec.LLM`."""

    def features(self, token_ids: Seq[int], layers: Seq[int]) -> tuple[Tensor, Tensor]:
        """[n, m, H] outputs of m layers and [n, H] hidden after the final norm, over n tokens."""
        ...


def collect_features(
    target: FeatureSource,
    answers_path: Path,
    cache_dir: Path,
    layers: Seq[int],
    options: Collecting,
) -> None:
    """Write `dev-*` and `train-*` shards; those that exist are kept, so a stopped run continues."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    dev, train = split_answers(read_answers(answers_path), options.num_dev, options.split_seed)
    train = order_answers(train, options.order_seed, options.greedy_weight)
    jobs = {"dev-00000": dev} | {
        f"train-{i // options.shard_size:05d}": train[i : i + options.shard_size]
        for i in range(0, min(len(train), options.max_train), options.shard_size)
    }
    for name, answers in track(jobs.items(), description="features"):
        path = cache_dir / f"{name}.safetensors"
        if not path.exists():
            write_shard(path, [_run(target, answer, layers) for answer in answers], layers)


def _run(target: FeatureSource, answer: Answer, layers: Seq[int]) -> FeatureSequence:
    token_ids = answer.prompt_ids + answer.output_ids
    # NOTE: a drafter may read the final hidden state only; the engine always captures a layer.
    taps, last = target.features(token_ids, layers or [0])
    taps = taps[:, : len(layers)]
    is_output = torch.arange(len(token_ids)) >= len(answer.prompt_ids)
    return FeatureSequence(
        torch.tensor(token_ids, dtype=torch.int32),
        is_output.to(torch.uint8),
        taps.to(torch.bfloat16),
        last.to(torch.bfloat16),
        answer.temperature,
        answer.category,
    )
