"""The stages of training a drafter, each a function over files; the command line calls these."""

from pathlib import Path

import torch

from . import loop
from .answers import count_bigrams, count_tokens, read_answers
from .cache import FeatureCache
from .config import Batching, DSparkLoss, DSparkShape, LoopConfig
from .dspark import DSparkTask
from .dspark_model import DSparkModel, dims_of
from .start import (
    choose_draft_vocab,
    measure_tap_scale,
    start_embeddings,
    start_markov_head,
)
from .target import load_target


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
