"""The stages of training a drafter, each a function over files; the command line calls these."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from truespec.config import EngineConfig
from truespec.llm import LLM
from truespec.models.config import ModelConfig
from truespec.models.loader import open_checkpoint
from truespec.utils.model_path import resolve_model_path

from .algorithms import ALGORITHMS, TrainingFiles, TrainingOptions
from .answers import order_answers, read_answers, split_answers
from .cache import FeatureCache
from .collect import collect_features
from .config import Answering, Collecting
from .generate import answer_prompts, open_jobs
from .record import options_of, write_options


def model_config(model: str) -> ModelConfig:
    """Sizes of a model given by path or name."""
    return open_checkpoint(resolve_model_path(model))[1]


def default_layers(target: ModelConfig) -> tuple[int, ...]:
    """Layers of the target that any drafter of the default shapes reads, ascending."""
    shapes = [algorithm.default_shape(target) for algorithm in ALGORITHMS.values()]
    return tuple(sorted({layer for shape in shapes for layer in shape.target_layer_ids}))


def answer(model: str, prompts_path: Path, answers_path: Path, options: Answering) -> None:
    """Record the target's answers to prompts."""
    llm = LLM(EngineConfig(model_path=model))
    jobs = open_jobs(llm, prompts_path, answers_path, options)
    answer_prompts(llm, jobs, answers_path, options)


def collect(
    model: str, answers_path: Path, cache_dir: Path, layers: tuple[int, ...], options: Collecting
) -> None:
    """Run the target over recorded answers; says first how large the cache will be."""
    check_cache_size(answers_path, cache_dir, layers, model_config(model).hidden_size, options)
    collect_features(LLM(EngineConfig(model_path=model)), answers_path, cache_dir, layers, options)


def train_drafter(
    algorithm: str, files: TrainingFiles, options: TrainingOptions, made_with: Mapping[str, object]
) -> None:
    """Train on a feature cache; the best checkpoint so far is `files.run_dir/export`.

    made_with: more of what the card tells, for options.json. Called again with the same arguments
    it resumes. Raises ValueError if the run directory holds another training.
    """
    dev, train = (FeatureCache(files.cache, split, ()) for split in ("dev", "train"))
    data = {"held_out": len(dev), "answers": len(train), "tokens": train.num_tokens}
    record = options_of(algorithm, options, files.init_from)
    write_options(files.run_dir, {**record, "data": data, **made_with})
    ALGORITHMS[algorithm].train(files, options)


def check_cache_size(
    answers_path: Path,
    cache_dir: Path,
    layers: tuple[int, ...],
    hidden_size: int,
    options: Collecting,
) -> None:
    """Write the size of the feature cache to stderr. Raises OSError if the disk is too small."""
    dev, train = split_answers(read_answers(answers_path), options.num_dev, options.split_seed)
    train = order_answers(train, options.order_seed, options.greedy_weight)[: options.max_train]
    num_tokens = sum(len(a.prompt_ids) + len(a.output_ids) for a in [*dev, *train])
    size = num_tokens * ((len(layers) + 1) * hidden_size * 2 + 5)  # bf16; an id and a mask byte
    cache_dir.mkdir(parents=True, exist_ok=True)
    there = sum(shard.stat().st_size for shard in cache_dir.glob("*.safetensors"))
    free = shutil.disk_usage(cache_dir).free
    sys.stderr.write(
        f"{cache_dir}: {len(dev)} + {len(train)} answers, {num_tokens} tokens, "
        f"{size / 1e9:.2f} GB in all; {free / 1e9:.1f} GB of disk are free\n"
    )
    if size - there > free:
        raise OSError(
            f"the disk of {cache_dir} has no room for the features: {(size - there) / 1e9:.2f} GB "
            f"are missing and {free / 1e9:.2f} GB are free; collect fewer with --max-train, of "
            "fewer layers, or elsewhere"
        )
