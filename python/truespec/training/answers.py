"""Recorded answers of the target: the text stage of training, one JSON object per line, gzipped."""

import gzip
import json
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target to one prompt."""

    category: str
    temperature: float
    prompt_ids: list[int]
    output_ids: list[int]


def read_answers(path: Path) -> list[Answer]:
    """Read `{category, temperature, prompt_ids, output_ids}` lines of a .jsonl.gz file."""
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    names = ("category", "temperature", "prompt_ids", "output_ids")
    return [Answer(*(record[name] for name in names)) for record in records]


def split_answers(
    answers: Seq[Answer], num_dev: int, seed: int
) -> tuple[list[Answer], list[Answer]]:
    """Hold out whole prompts until `num_dev` answers or more are held out; returns (dev, train)."""
    by_prompt: dict[str, list[Answer]] = {}
    for answer in answers:
        by_prompt.setdefault(json.dumps(answer.prompt_ids), []).append(answer)
    prompts = sorted(by_prompt)
    random.Random(seed).shuffle(prompts)
    dev: list[Answer] = []
    while len(dev) < num_dev:
        dev += by_prompt[prompts.pop(0)]
    return dev, [answer for prompt in prompts for answer in by_prompt[prompt]]


def order_answers(answers: Seq[Answer], seed: int, greedy_weight: float) -> list[Answer]:
    """A random order in which answers at T = 0 come early: weighted draws without replacement."""
    rng = random.Random(seed)
    weights = [greedy_weight if answer.temperature == 0.0 else 1.0 for answer in answers]
    keys = [rng.random() ** (1.0 / weight) for weight in weights]
    order = sorted(range(len(answers)), key=keys.__getitem__, reverse=True)
    return [answers[i] for i in order]


def count_tokens(answers: Seq[Answer], vocab_size: int) -> np.ndarray:
    """How often each token was generated; [V] int64."""
    ids = np.concatenate([np.asarray(a.output_ids) for a in answers])
    return np.bincount(ids, minlength=vocab_size)


def count_bigrams(answers: Seq[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (token, next generated token) and their counts: [n, 2] int64, [n] int64."""
    pairs = [np.stack([a.output_ids[:-1], a.output_ids[1:]], axis=1) for a in answers]
    return np.unique(np.concatenate(pairs), axis=0, return_counts=True)
