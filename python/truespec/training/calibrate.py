"""Calibrating the confidence head on greedy answers, after the drafter is trained.

First the head is fitted anew: logistic regression of "draft k is right" on the blocks whose drafts
before k were right. Then sequential temperature scaling (arXiv 2607.05147, 3.2): left to right,
draft k gets the temperature that makes the product of the confidences up to k agree best with how
often the first k drafts are all right; it keeps the order within a position.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import all_anchors, make_batch
from .cache import FeatureCache
from .dspark_model import DSparkModel, forward_blocks
from .export import export_block, read_dspark
from .measure import draft_greedily
from .target import Target, load_target

TEMPERATURES = np.logspace(-1, 1, 41)
NUM_BINS = 15


def calibrate_dspark(
    checkpoint: Path, target_dir: Path, cache_dir: Path, *, num_answers: int
) -> None:
    """Refit the head on `num_answers` training answers, the temperatures on the held-out ones.

    Rewrites the checkpoint; `confidence_temperatures` [G] goes into its config.json.
    """
    target = load_target(target_dir)
    model, draft_vocab = read_dspark(checkpoint, target)
    layers = model.shape.target_layer_ids
    train, dev = (FeatureCache(cache_dir, split, layers) for split in ("train", "dev"))
    fit_head(model, *draft_blocks(model, target, draft_vocab, train, num_answers))
    export_block(model, target, draft_vocab, checkpoint)
    inputs, accepted = draft_blocks(model, target, draft_vocab, dev, len(dev))
    with torch.no_grad():
        logits = model.confidence_head.proj(inputs).squeeze(-1).numpy()
    temperatures, before, after = fit_temperatures(logits, accepted.numpy())
    _write_temperatures(checkpoint / "config.json", temperatures)
    print(f"{len(logits)} blocks; calibration error per draft, before {before}, after {after}")


@torch.no_grad()
def draft_blocks(
    model: DSparkModel, target: Target, draft_vocab: Tensor, cache: FeatureCache, num_answers: int
) -> tuple[Tensor, Tensor]:
    """Inputs of the confidence head [n, G, H + r] fp32, and [n, G] bool: drafts 0..k were right.

    Every block of the first `num_answers` answers at T = 0.
    """
    head = target.head[draft_vocab].to(torch.bfloat16)
    inputs: list[Tensor] = []
    accepted: list[Tensor] = []
    for sequence in cache:
        # Blocks that reach past the recorded answer say nothing about their last drafts.
        anchors = all_anchors(sequence)[: -model.shape.block_size + 1 or None]
        if sequence.temperature != 0.0 or len(anchors) == 0:
            continue
        if len(inputs) == num_answers:
            break
        batch = make_batch([sequence], [anchors], model.shape.block_size)
        hidden = forward_blocks(model, batch, target.embedding)[0]
        hits, features = draft_greedily(model, batch, hidden, head, draft_vocab)
        inputs.append(features)
        accepted.append(hits)
    return torch.cat(inputs), torch.cat(accepted)


def fit_head(model: DSparkModel, inputs: Tensor, accepted: Tensor) -> None:
    """Logistic regression of acceptance, given that all drafts before were accepted."""
    reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1)
    x, y = inputs[reached], accepted[reached].float()
    proj = model.confidence_head.proj
    torch.nn.init.zeros_(proj.weight)
    torch.nn.init.zeros_(proj.bias)
    optimizer = torch.optim.LBFGS(proj.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(proj(x).squeeze(-1), y)
        loss = loss + proj.weight.square().sum() * (10.0 / len(y))
        loss.backward()
        return loss

    optimizer.step(closure)


def fit_temperatures(
    logits: np.ndarray, accepted: np.ndarray
) -> tuple[list[float], list[float], list[float]]:
    """Temperatures [G], and the calibration errors of the products before and after, [G] each."""
    temperatures, before, after = [], [], []
    fitted, plain = np.ones(len(logits)), np.ones(len(logits))
    for z, prefix in zip(logits.T, accepted.T, strict=True):
        candidates = fitted / (1.0 + np.exp(-z / TEMPERATURES[:, None]))  # [41, n]
        errors = [calibration_error(c, prefix) for c in candidates]
        best = int(np.argmin(errors))
        fitted, plain = candidates[best], plain / (1.0 + np.exp(-z))
        temperatures.append(round(float(TEMPERATURES[best]), 4))
        before.append(round(calibration_error(plain, prefix), 4))
        after.append(round(errors[best], 4))
    return temperatures, before, after


def calibration_error(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Expected calibration error, equal-width bins; predicted [n] in (0, 1), happened [n] bool."""
    bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, predicted - happened, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def _write_temperatures(path: Path, temperatures: list[float]) -> None:
    config = json.loads(path.read_text()) | {"confidence_temperatures": temperatures}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(partial, path)
