"""From a model and prompts to a drafter in one go: the stages after one another, in one directory.

Knows which file of which stage goes where; no tensors.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from truespec.config import EngineConfig
from truespec.llm import LLM
from truespec.models.export import export_model
from truespec.models.loader import open_checkpoint
from truespec.utils.model_path import resolve_model_path

from .algorithms import ALGORITHMS, TrainingFiles, TrainingOptions
from .calibrate import calibrate_dspark
from .card import write_card
from .collect import collect_features
from .config import Answering, Calibrating, Collecting
from .generate import answer_prompts, open_jobs
from .record import check_options, options_of
from .stages import check_cache_size, model_config, train_drafter


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a whole training keeps its files, all under one directory."""

    root: Path

    @property
    def answers(self) -> Path:
        return self.root / "answers.jsonl.gz"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def target(self) -> Path:
        """Only written for a target that is a GGUF file."""
        return self.root / "target"

    @property
    def export(self) -> Path:
        """The drafter: where the training writes it when run in `root`."""
        return self.root / "export"


def train_everything(
    algorithm: str,
    model: str,
    prompts_path: Path,
    layout: Layout,
    *,
    answering: Answering,
    collecting: Collecting,
    options: TrainingOptions,
    init_from: Path | None,
    command: str,
) -> None:
    """From a model and prompts to a drafter with its card in `layout.export`.

    Every stage picks up what is there. Raises ValueError if the prompts ask for answers that the
    features already collected do not cover, or if the directory holds another training.
    """
    if 0.0 not in answering.temperatures:
        raise ValueError(f"temperatures are {answering.temperatures}, 0 must be among them")
    check_options(layout.root, options_of(algorithm, options, init_from))
    _prepare_data(model, prompts_path, layout, options, answering, collecting)
    files = TrainingFiles(
        layout.answers, _target_dir(model, layout), layout.cache, layout.root, init_from
    )
    made_with = {
        "command": command,
        "model": model,
        "answering": asdict(answering),
        "collecting": asdict(collecting),
    }
    train_drafter(algorithm, files, options, made_with)
    fields = json.loads((layout.export / "config.json").read_text())
    if ALGORITHMS[algorithm].calibrates and "confidence_temperatures" not in fields:
        num_answers = Calibrating().num_answers
        calibrate_dspark(layout.export, files.target, layout.cache, num_answers=num_answers)
    write_card(layout.root)


def _prepare_data(
    model: str,
    prompts_path: Path,
    layout: Layout,
    options: TrainingOptions,
    answering: Answering,
    collecting: Collecting,
) -> None:
    """Answers, then features; the engine is gone when this returns."""
    llm = LLM(EngineConfig(model_path=model))
    jobs = open_jobs(llm, prompts_path, layout.answers, answering)
    # NOTE: more answers would move prompts between the held-out split and the training split.
    if jobs and any(layout.cache.glob("*.safetensors")):
        raise ValueError(
            f"{layout.cache} was collected before {len(jobs)} of the answers asked for: use "
            "another --out, or remove the cache and state.pt to train anew"
        )
    answer_prompts(llm, jobs, layout.answers, answering)
    layers, hidden = options.shape.target_layer_ids, model_config(model).hidden_size
    check_cache_size(layout.answers, layout.cache, layers, hidden, collecting)
    collect_features(llm, layout.answers, layout.cache, layers, collecting)


def _target_dir(model: str, layout: Layout) -> Path:
    """The target in Hugging Face's layout, written once if it is a GGUF file."""
    path = resolve_model_path(model)
    if path.is_dir():
        return path
    if not layout.target.exists():
        partial = layout.target.with_name("target.partial")
        export_model(*open_checkpoint(path), partial, "bfloat16")
        os.replace(partial, layout.target)
    return layout.target
