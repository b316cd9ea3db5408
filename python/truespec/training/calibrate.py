"""Calibrating the confidence head by sequential temperature scaling (arXiv 2607.05147, 3.2).

Left to right, draft k gets the temperature that makes the product of the confidences up to k agree
best with how often the first k drafts are all accepted. Order within a position is kept.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch

from .blocks import all_anchors, make_batch
from .cache import FeatureCache
from .dspark_model import forward_blocks
from .export import read_dspark
from .measure import draft_greedily
from .target import load_target

TEMPERATURES = np.logspace(-1, 1, 41)
NUM_BINS = 15


def calibrate_dspark(checkpoint: Path, target_dir: Path, cache_dir: Path, split: str) -> None:
    """Fit on greedy answers; writes `confidence_temperatures` into the checkpoint's config.json."""
    logits, accepted = collect_confidences(checkpoint, target_dir, cache_dir, split)
    temperatures, before, after = fit_temperatures(logits, accepted)
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | {"confidence_temperatures": temperatures}
    partial = path.with_name("config.json.partial")
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(partial, path)
    print(f"{len(logits)} blocks; calibration error per draft, before {before}, after {after}")


@torch.no_grad()
def collect_confidences(
    checkpoint: Path, target_dir: Path, cache_dir: Path, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """[n, G] confidence logits and [n, G] whether drafts 0..k were all right, at T = 0 only."""
    target = load_target(target_dir)
    model, draft_vocab = read_dspark(checkpoint, target)
    head = target.head[draft_vocab].to(torch.bfloat16)
    logits, accepted = [], []
    for sequence in FeatureCache(cache_dir, split, model.shape.target_layer_ids):
        # Blocks that reach past the recorded answer say nothing about their last drafts.
        anchors = all_anchors(sequence)[: -model.shape.block_size + 1 or None]
        if sequence.temperature != 0.0 or len(anchors) == 0:
            continue
        batch = make_batch([sequence], [anchors], model.shape.block_size)
        hidden = forward_blocks(model, batch, target.embedding)[0]
        hits, confidence = draft_greedily(model, batch, hidden, head, draft_vocab)
        logits.append(confidence.numpy())
        accepted.append(hits.numpy())
    return np.concatenate(logits), np.concatenate(accepted)


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
