"""The stages of training a drafter, each a function over files; the command line calls these."""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from truespec.config import EngineConfig
from truespec.llm import LLM
from truespec.models.config import ModelConfig
from truespec.models.loader import open_checkpoint
from truespec.utils.model_path import resolve_model_path

from . import loop
from .answers import count_bigrams, count_tokens, order_answers, read_answers, split_answers
from .cache import FeatureCache
from .collect import collect_features
from .config import (
    Answering,
    Batching,
    Collecting,
    DFlashLoss,
    DFlashShape,
    DSparkLoss,
    DSparkShape,
    LoopConfig,
)
from .dflash import DFlashModel, DFlashTask
from .dspark import DSparkTask
from .dspark_model import DSparkModel, dims_of
from .generate import answer_prompts, open_jobs
from .start import (
    choose_draft_vocab,
    measure_tap_scale,
    start_embeddings,
    start_from_checkpoint,
    start_markov_head,
)
from .target import load_target


def model_config(model: str) -> ModelConfig:
    """Sizes of a model given by path or name."""
    return open_checkpoint(resolve_model_path(model))[1]


def default_shape(target: ModelConfig) -> DSparkShape:
    """A shape that fits the target: five layers spread over its depth (DFlash's choice), as many
    KV heads as it has heads, and no more draft ids than it has ids."""
    first = min(1, target.num_layers - 1)
    places = np.linspace(first, max(first, target.num_layers - 3), 5)
    return DSparkShape(
        target_layer_ids=tuple(sorted({round(float(place)) for place in places})),
        num_kv_heads=target.num_heads,
        draft_vocab_size=min(DSparkShape().draft_vocab_size, target.vocab_size),
    )


def answer(model: str, prompts_path: Path, answers_path: Path, options: Answering) -> None:
    """Record the target's answers to prompts."""
    llm = LLM(EngineConfig(model_path=model))
    jobs = open_jobs(llm, prompts_path, answers_path, options)
    answer_prompts(llm, jobs, answers_path, options)


def collect(
    model: str, answers_path: Path, cache_dir: Path, layers: tuple[int, ...], options: Collecting
) -> None:
    """Run the target over recorded answers; says first how large the cache will be."""
    report_cache_size(answers_path, cache_dir, layers, model_config(model).hidden_size, options)
    collect_features(LLM(EngineConfig(model_path=model)), answers_path, cache_dir, layers, options)


def report_cache_size(
    answers_path: Path,
    cache_dir: Path,
    layers: tuple[int, ...],
    hidden_size: int,
    options: Collecting,
) -> int:
    """Write the size of the feature cache, in bytes, to stderr and return it."""
    dev, train = split_answers(read_answers(answers_path), options.num_dev, options.split_seed)
    train = order_answers(train, options.order_seed, options.greedy_weight)[: options.max_train]
    num_tokens = sum(len(a.prompt_ids) + len(a.output_ids) for a in [*dev, *train])
    size = num_tokens * ((len(layers) + 1) * hidden_size * 2 + 5)  # bf16; an id and a mask byte
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    sys.stderr.write(
        f"{cache_dir}: {len(dev)} + {len(train)} answers, {num_tokens} tokens, "
        f"{size / 1e9:.2f} GB in all; {free / 1e9:.1f} GB of disk are free\n"
    )
    return size


def train_dspark(
    answers_path: Path,
    target_dir: Path,
    cache_dir: Path,
    run_dir: Path,
    *,
    shape: DSparkShape,
    batching: Batching,
    loss: DSparkLoss,
    config: LoopConfig,
) -> None:
    """Train a DSpark drafter on a feature cache; the best checkpoint so far is `run_dir/export`.

    answers_path: recorded answers, for the draft vocabulary and the bigram start; target_dir:
    the target in Hugging Face's layout. Called again with the same arguments it resumes.
    """
    target = load_target(target_dir)
    if shape.draft_vocab_size > target.embedding.shape[0]:
        raise ValueError(f"{shape.draft_vocab_size} draft ids, the target has fewer")
    train = FeatureCache(cache_dir, "train", shape.target_layer_ids)
    dev = FeatureCache(cache_dir, "dev", shape.target_layer_ids)
    held_out = {tuple(s.token_ids[: s.answer_start].tolist()) for s in dev}
    answers = [a for a in read_answers(answers_path) if tuple(a.prompt_ids) not in held_out]
    torch.manual_seed(batching.seed)
    model = DSparkModel(shape, dims_of(target))
    counts = count_tokens(answers, model.dims.vocab)
    draft_vocab = choose_draft_vocab(counts, shape.draft_vocab_size)
    model.tap_scale.copy_(measure_tap_scale(train))
    start_embeddings(model, target, draft_vocab)
    start_markov_head(model, draft_vocab, *count_bigrams(answers))
    task = DSparkTask(model, target, draft_vocab, train, dev, batching=batching, loss=loss)
    loop.train(task, run_dir, config)


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
    target = load_target(target_dir)
    if shape.draft_vocab_size > target.embedding.shape[0]:
        raise ValueError(f"{shape.draft_vocab_size} draft ids, the target has fewer")
    train = FeatureCache(cache_dir, "train", shape.target_layer_ids)
    dev = FeatureCache(cache_dir, "dev", shape.target_layer_ids)
    torch.manual_seed(batching.seed)
    model = DFlashModel(shape, dims_of(target))
    model.tap_scale.copy_(measure_tap_scale(train))
    if init_from is not None:
        draft_vocab = start_from_checkpoint(model, init_from)
    else:
        held_out = {tuple(s.token_ids[: s.answer_start].tolist()) for s in dev}
        answers = [a for a in read_answers(answers_path) if tuple(a.prompt_ids) not in held_out]
        counts = count_tokens(answers, model.dims.vocab)
        draft_vocab = choose_draft_vocab(counts, shape.draft_vocab_size)
        start_embeddings(model, target, draft_vocab)
    return DFlashTask(model, target, draft_vocab, train, dev, batching=batching, loss=loss)
