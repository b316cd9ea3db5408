"""DSpark and DFlash trainings from files: their shapes for a target, their first weights."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from truespec.models.config import ModelConfig

from .answers import count_bigrams, count_tokens
from .config import Batching, DFlashLoss, DFlashShape, DSparkLoss, DSparkShape
from .data import TrainingData, load_data
from .dflash import DFlashTask
from .dspark import DSparkTask
from .dspark_model import BlockModel, DSparkModel, dims_of
from .export import read_shape
from .start import (
    TAKEN_OVER,
    measure_tap_scale,
    start_embeddings,
    start_from_checkpoint,
    start_markov_head,
)

BlockShape = TypeVar("BlockShape", bound=DSparkShape | DFlashShape)


def default_dspark_shape(target: ModelConfig) -> DSparkShape:
    """A shape that fits the target."""
    return _fitting(DSparkShape(), target)


def default_dflash_shape(target: ModelConfig) -> DFlashShape:
    """A shape that fits the target."""
    return _fitting(DFlashShape(), target)


def adopt_shape(shape: BlockShape, checkpoint: Path) -> BlockShape:
    """The shape that can start from a block drafter's weights; the block stays as long as it is."""
    theirs = read_shape(checkpoint)
    if isinstance(shape, DSparkShape) and theirs.markov_rank == 0:
        raise ValueError(f"{checkpoint} is a DFlash drafter: it has no Markov head to take over")
    names = [name for name in TAKEN_OVER if hasattr(shape, name)]
    return replace(shape, **{name: getattr(theirs, name) for name in names})


def build_dspark_task(
    answers_path: Path,
    target_dir: Path,
    cache_dir: Path,
    *,
    shape: DSparkShape,
    batching: Batching,
    loss: DSparkLoss,
    init_from: Path | None = None,
) -> DSparkTask:
    """What trains a DSpark drafter on a feature cache.

    answers_path: recorded answers, for the draft vocabulary and the bigram start; target_dir:
    the target in Hugging Face's layout; init_from: a DSpark checkpoint to go on from.
    """
    data = load_data(answers_path, target_dir, cache_dir, shape.target_layer_ids)
    torch.manual_seed(batching.seed)
    model = DSparkModel(shape, dims_of(data.target))
    draft_vocab = _start(model, data, init_from)
    if init_from is None:
        start_markov_head(model, draft_vocab, *count_bigrams(data.answers))
    return DSparkTask(
        model, data.target, draft_vocab, data.train, data.dev, batching=batching, loss=loss
    )


def build_dflash_task(
    answers_path: Path,
    target_dir: Path,
    cache_dir: Path,
    *,
    shape: DFlashShape,
    batching: Batching,
    loss: DFlashLoss,
    init_from: Path | None = None,
) -> DFlashTask:
    """What trains a DFlash drafter on a feature cache.

    init_from: a DSpark or DFlash checkpoint whose backbone and draft vocabulary are taken over.
    """
    data = load_data(answers_path, target_dir, cache_dir, shape.target_layer_ids)
    torch.manual_seed(batching.seed)
    model = BlockModel(shape, dims_of(data.target))
    draft_vocab = _start(model, data, init_from)
    return DFlashTask(
        model, data.target, draft_vocab, data.train, data.dev, batching=batching, loss=loss
    )


def _fitting(shape: BlockShape, target: ModelConfig) -> BlockShape:
    """Five layers spread over the target's depth (DFlash's choice), as many KV heads as it has
    heads, and no more draft ids than it has ids."""
    first = min(1, target.num_layers - 1)
    places = np.linspace(first, max(first, target.num_layers - 3), 5)
    return replace(
        shape,
        target_layer_ids=tuple(sorted({round(float(place)) for place in places})),
        num_kv_heads=target.num_heads,
        draft_vocab_size=min(shape.draft_vocab_size, target.vocab_size),
    )


def _start(model: BlockModel, data: TrainingData, init_from: Path | None) -> Tensor:
    """First weights of the backbone; returns the draft vocabulary, [DV] int64."""
    model.tap_scale.copy_(measure_tap_scale(data.train))
    if init_from is not None:
        counts = count_tokens(data.answers, model.dims.vocab)
        return start_from_checkpoint(model, init_from, counts)
    draft_vocab = data.draft_vocab(model.shape.draft_vocab_size)
    start_embeddings(model, data.target, draft_vocab)
    return draft_vocab
