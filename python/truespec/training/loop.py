"""The training loop of every drafter: Muon and AdamW, cosine, weight averaging, resume, curves.

Knows tasks, not algorithms. Everything it writes lies under one run directory.
"""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from .config import LoopConfig
from .curves import plot_history
from .disk import naming_a_full_disk
from .rounding import ROUNDINGS, rounded

Model = TypeVar("Model", bound=nn.Module)


class Task(Protocol[Model]):
    """What can be trained. `loss` depends on weights and arguments alone, so resuming is exact."""

    model: Model

    def loss(self, batch_index: int, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Loss of one batch and its metrics; progress in [0, 1). Called from several threads."""
        ...

    def to(self, device: torch.device) -> None:
        """Compute on a device from now on."""
        ...

    def measure(self) -> dict[str, float]:
        """Held-out figures of `model`; `greedy` decides which weights are best."""
        ...

    def export(self, path: Path) -> None:
        """Write `model` as a loadable checkpoint, atomically."""
        ...


@dataclass(slots=True)
class RunState(Generic[Model]):
    """Everything that changes during a run, besides the model's weights."""

    optimizers: list[torch.optim.Optimizer]
    average: Model  # exponential moving average of the weights: measured and exported
    step: int
    best: float


def train(task: Task[Model], run_dir: Path, config: LoopConfig) -> RunState[Model]:
    """Train to `num_steps`, resuming from `run_dir/state.pt` if it exists.

    Writes state.pt (weights, optimiser, step), history.jsonl (one line per measurement), curves.png
    and export/ (averaged weights with the best held-out `greedy`). Raises ValueError if there is no
    such device or rounding.
    """
    if config.rounding not in ROUNDINGS:
        known = " or ".join(ROUNDINGS)
        raise ValueError(f"the rounding is {config.rounding}, expected {known}")
    task.to(_device(config))
    run_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    state = start_state(task, config)
    if (run_dir / "state.pt").exists():
        load_state(task, state, run_dir / "state.pt")
    saved_at, sums = time.monotonic(), _Mean()
    with _progress() as bar:
        job = bar.add_task("", total=config.num_steps, completed=state.step)
        while state.step < config.num_steps:
            metrics = train_step(task, state, config)
            sums.add(metrics)
            bar.update(job, advance=1, description=_describe(sums.peek()))
            if state.step % config.measure_every == 0 or state.step == config.num_steps:
                _measure_and_export(task, state, run_dir, sums.take(), config.rounding)
                save_state(task, state, run_dir / "state.pt")
                saved_at = time.monotonic()
            elif time.monotonic() - saved_at > config.save_every_s:
                save_state(task, state, run_dir / "state.pt")
                saved_at = time.monotonic()
    return state


def start_state(task: Task[Model], config: LoopConfig) -> RunState[Model]:
    """Fresh optimisers and average for the task's present weights."""
    average = deepcopy(task.model).requires_grad_(False)
    return RunState(_make_optimizers(task.model, config), average, step=0, best=0.0)


def train_step(task: Task[Model], state: RunState[Model], config: LoopConfig) -> dict[str, float]:
    """One optimiser step over `num_threads` batches; returns mean metrics and the learning rate."""
    rate = learning_rate(state.step, config)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    with rounded(task.model, config.rounding):
        metrics = _compute_gradients(task, state.step, config)
    norm = float(nn.utils.clip_grad_norm_(task.model.parameters(), config.grad_clip))
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm} at step {state.step}")
    with ThreadPoolExecutor(config.num_workers) as pool:
        list(pool.map(lambda optimizer: optimizer.step(), state.optimizers))
    state.step += 1
    _update_average(state, task.model, config.average_decay)
    return metrics | {"grad_norm": norm, "learning_rate": rate}


def learning_rate(step: int, config: LoopConfig) -> float:
    """Linear warm-up, then cosine to zero at `num_steps`."""
    warmup = max(1, round(config.warmup_fraction * config.num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.num_steps - warmup)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def save_state(task: Task[Model], state: RunState[Model], path: Path) -> None:
    """Write weights, averages, optimiser and step; the old file stays until the new is complete."""
    partial = path.with_name(path.name + ".partial")
    saved = {
        "model": task.model.state_dict(),
        "average": state.average.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        "step": state.step,
        "best": state.best,
    }
    with naming_a_full_disk(partial):
        torch.save(saved, partial)
    os.replace(partial, path)


def load_state(task: Task[Model], state: RunState[Model], path: Path) -> None:
    """Restore what `save_state` wrote into the task's model and `state`."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    task.model.load_state_dict(saved["model"])
    state.average.load_state_dict(saved["average"])
    for optimizer, values in zip(state.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    state.step, state.best = saved["step"], saved["best"]


def _device(config: LoopConfig) -> torch.device:
    if config.device not in ("cpu", "cuda"):
        raise ValueError(f"the device is {config.device}, expected cpu or cuda")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device is cuda, but torch finds none here")
    return torch.device(config.device)


def _make_optimizers(model: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Muon (its update scaled to AdamW's size, so one rate serves both) and AdamW.

    Muon's matrices are shared out to one optimiser per thread: its iterations take as long as a
    quarter of a step otherwise, on one core.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim == 2 and min(parameter.shape) >= config.muon_min_dim
        (matrices if is_matrix else others).append(parameter)
    rate, decay = config.learning_rate, config.weight_decay
    adamw = torch.optim.AdamW(
        others, lr=rate, betas=(0.9, config.beta2), weight_decay=decay, fused=True
    )
    matrices.sort(key=lambda matrix: -matrix.numel())
    shares = (matrices[i :: config.num_threads] for i in range(config.num_threads))
    muons = (
        torch.optim.Muon(
            share, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw", ns_steps=4
        )
        for share in shares
        if share
    )
    return [*muons, adamw]


def _compute_gradients(task: Task[Model], step: int, config: LoopConfig) -> dict[str, float]:
    """Set every `grad` to the mean over the step's batches, one batch per thread.

    NOTE: kernels run single-threaded. A team of threads meets after every small operation, and on a
    busy machine each meeting costs a time slice; whole batches on threads of their own meet once.
    """
    parameters = list(task.model.parameters())

    def part(index: int) -> tuple[tuple[Tensor, ...], dict[str, float]]:
        loss, metrics = task.loss(step * config.num_threads + index, step / config.num_steps)
        return torch.autograd.grad(loss, parameters), metrics

    with ThreadPoolExecutor(config.num_workers) as pool:
        parts = list(pool.map(part, range(config.num_threads)))
    for parameter, *grads in zip(parameters, *(grads for grads, _ in parts), strict=True):
        parameter.grad = torch.stack(grads).mean(0)
    mean = _Mean()
    for _, metrics in parts:
        mean.add(metrics)
    return mean.take()


def _measure_and_export(
    task: Task[Model],
    state: RunState[Model],
    run_dir: Path,
    metrics: dict[str, float],
    rounding: str,
) -> None:
    """Measure the averaged weights as rounded; export them, exact, if they are the best so far."""
    live = task.model
    task.model = state.average
    try:
        with rounded(state.average, rounding):
            figures = task.measure()
        if figures.get("greedy", 0.0) >= state.best:
            state.best = figures.get("greedy", 0.0)
            task.export(run_dir / "export")
    finally:
        task.model = live
    line = {"step": state.step, "time": time.time()}
    line |= {f"train/{k}": round(v, 5) for k, v in metrics.items()}
    line |= {f"dev/{k}": round(v, 4) for k, v in figures.items()}
    with (run_dir / "history.jsonl").open("a") as history:
        history.write(json.dumps(line) + "\n")
    plot_history(run_dir)


@torch.no_grad()
def _update_average(state: RunState[Model], model: nn.Module, decay: float) -> None:
    """Moving average whose horizon grows with the step, so that early weights are forgotten."""
    rate = max(1.0 - decay, 10.0 / (state.step + 10.0))
    torch._foreach_lerp_(list(state.average.parameters()), list(model.parameters()), rate)


class _Mean:
    """Running mean of metric dictionaries since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, metrics: dict[str, float]) -> None:
        self._sums = {k: self._sums.get(k, 0.0) + v for k, v in metrics.items()}
        self._count += 1

    def peek(self) -> dict[str, float]:
        return {k: v / max(1, self._count) for k, v in self._sums.items()}

    def take(self) -> dict[str, float]:
        means = self.peek()
        self._sums, self._count = {}, 0
        return means


def _progress() -> Progress:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.description}"))


def _describe(metrics: dict[str, float]) -> str:
    return " ".join(f"{k} {metrics[k]:.3f}" for k in ("loss", "tau", "top1") if k in metrics)
