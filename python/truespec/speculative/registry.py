"""From options to a running worker: which class, which drafter, how much memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from truespec import env
from truespec.config import EngineConfig, Machine, kv_dtype, options, resolve
from truespec.constrained.matcher import GrammarBackend
from truespec.constrained.vocabulary import LoadTokens, no_tokens
from truespec.engine.memory import free_bytes
from truespec.engine.runner import ModelRunner
from truespec.engine.worker import ModelInfo
from truespec.kernels import kernel_set
from truespec.kernels.reference_selftest import self_test_row_invariance
from truespec.kvcache import KVCache, KVPool, LayerSpec
from truespec.layers.warm_up import compile_row_kernels
from truespec.models.config import ModelConfig
from truespec.models.drafters.checkpoint import read_fields
from truespec.models.llama import CausalLM
from truespec.models.loader import load_model
from truespec.speculative.base import EngineParts, SpecWorker, WorkerPlan
from truespec.speculative.dflash_worker_v2 import DFlashWorker
from truespec.speculative.dspark_worker_v2 import DSparkWorker
from truespec.speculative.eagle_worker_v2 import EagleWorker
from truespec.speculative.grammars import Grammars
from truespec.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleWorker
from truespec.speculative.ngram_worker import NgramWorker
from truespec.speculative.plain_worker import PlainWorker
from truespec.speculative.profile import measure_costs

WORKERS: dict[str, type[SpecWorker]] = {
    "NONE": PlainWorker,
    "NGRAM": NgramWorker,
    "DSPARK": DSparkWorker,
    "DFLASH": DFlashWorker,
    "EAGLE": EagleWorker,
    "EAGLE3": EagleWorker,
    "NEXTN": EagleWorker,
}

COMMON = {
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_quantization",
    "speculative_adaptive",
}

Progress = Callable[[str, float], None]
ASSETS = Path(__file__).parents[1] / "assets" / "drafters"


def build_worker(
    config: EngineConfig,
    progress: Progress = lambda phase, done: None,
    load_tokens: LoadTokens = no_tokens,
) -> tuple[SpecWorker, EngineConfig, dict[str, float]]:
    """Load everything an engine needs.

    Args:
        config: unresolved options.
        progress: is told each phase as it begins and its share done (0..1).
        load_tokens: gives the tokenizer when the first grammar needs it.

    Returns (worker, resolved config, seconds per phase).
    Raises ValueError naming what does not fit.
    """
    phases: dict[str, float] = {}
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        progress(name, 0.0)
        start = time.perf_counter()
        yield
        phases[name] = round(time.perf_counter() - start, 3)

    with phase("kernels"):
        compile_row_kernels()
        # What is imported stays: a collection that visited it would stop a step for 0.1 seconds.
        gc.collect()
        gc.freeze()
        kernels = kernel_set(
            env.cpu_kernels(),
            device,
            cache_dir=env.cache_dir(),
            num_threads=config.num_threads or env.num_threads(),
            progress=lambda what: progress(f"compiling {what}", 0.0),
            lossy_int8_activations=config.lossy_int8_activations,
        )
    with phase("model"):
        target = load_model(config.model_path, kernels, dtype=config.dtype)
        if config.lossy_int8_activations and not kernels.is_lossy:
            raise ValueError("--lossy-int8-activations: the model has no quantized weights")
    if kernels.name == "torch" and device == "cpu":
        with phase("self-test"):
            self_test_row_invariance(kernels, target.shape, target.config.vocab_size)
    with phase("drafter"):
        chosen = worker_class(config)
        path = _draft_path(config, target.config, chosen) if chosen.needs_drafter else None
        plan = chosen.plan(config, target, path)
    with phase("memory"):
        worker, resolved = build_from_plan(config, target, plan, device, load_tokens)
    if resolved.speculative_adaptive and worker.num_drafts:
        with phase("profile"):
            worker.planner.costs = measure_costs(worker)
    return worker, resolved, phases


def worker_class(config: EngineConfig) -> type[SpecWorker]:
    """The worker that the options name.

    Raises ValueError for a speculative option that it does not read.
    """
    chosen = WORKERS[config.speculative_algorithm]
    if config.enable_multi_layer_eagle and config.speculative_algorithm in ("EAGLE", "NEXTN"):
        chosen = MultiLayerEagleWorker
    for option in options(EngineConfig):
        is_set = getattr(config, option.name) != option.default
        is_speculative = "speculative" in option.name or "eagle" in option.name
        if is_set and is_speculative and option.name not in chosen.options | COMMON:
            flag = option.name.replace("_", "-")
            raise ValueError(f"--{flag} has no effect with {config.speculative_algorithm}")
    return chosen


def build_from_plan(
    config: EngineConfig,
    target: CausalLM,
    plan: WorkerPlan,
    device: Literal["cpu", "cuda"] = "cpu",
    load_tokens: LoadTokens = no_tokens,
) -> tuple[SpecWorker, EngineConfig]:
    """Give a planned worker its memory."""
    dtype = getattr(torch, kv_dtype(config, device))
    model = target.config
    layers = LayerSpec(model.num_layers, model.num_kv_heads, model.head_dim)
    draft = plan.draft_layers
    per_token = layers.bytes_per_token(dtype) + (draft.bytes_per_token(dtype) if draft else 0)
    machine = Machine(
        device=device,
        kernels=target.kernels.name,
        free_bytes=free_bytes(device),
        context_length=model.context_length,
        kv_bytes_per_token=per_token,
    )
    resolved = resolve(config, machine)
    assert resolved.context_length is not None, "resolve fills it"
    assert resolved.max_total_tokens is not None, "resolve fills it"
    num_pages = resolved.max_total_tokens // resolved.page_size
    pool = KVPool(
        num_pages=num_pages,
        page_size=resolved.page_size,
        target=layers,
        draft=draft,
        dtype=dtype,
        device=torch.device(device),
    )
    cache = KVCache(
        num_pages=num_pages,
        page_size=resolved.page_size,
        max_rows=resolved.max_running_requests,
        max_tokens=resolved.context_length + plan.num_draft_slots,
        lookahead=plan.lookahead,
        enable_prefix=not resolved.disable_radix_cache,
    )
    info = ModelInfo(
        vocab_size=model.vocab_size,
        context_length=resolved.context_length,
        eos_token_ids=model.eos_token_ids,
        generation_defaults=dict(model.sampling_defaults),
        name=config.model_path,
    )
    grammars = Grammars(GrammarBackend(load_tokens, model.vocab_size, model.eos_token_ids))
    parts = EngineParts(ModelRunner(target, pool), cache, info, resolved, grammars)
    return plan.make(parts, plan), resolved


def _draft_path(config: EngineConfig, target: ModelConfig, chosen: type[SpecWorker]) -> Path:
    """The drafter's directory: the given one, or the one shipped for this target."""
    if config.speculative_draft_model_path is not None:
        path = Path(config.speculative_draft_model_path).expanduser()
        if not path.is_dir():
            raise ValueError(f"--speculative-draft-model-path {path} is not a directory")
        return path
    algorithm = config.speculative_algorithm
    kind = "mtp" if chosen is MultiLayerEagleWorker else algorithm.lower()
    for path in sorted(ASSETS.glob(f"*-{kind}")):
        fields = read_fields(path)
        facts = (target.hidden_size, target.vocab_size, target.num_layers)
        names = ("hidden_size", "vocab_size", "num_target_layers")
        if tuple(fields.get(name) for name in names) == facts:
            return path
    raise ValueError(
        f"no {algorithm} drafter is shipped for this target: give --speculative-draft-model-path"
    )
