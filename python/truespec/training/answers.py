"""Recorded answers of the target: the text stage of training, one JSON object per line, gzipped."""

import gzip
import json
import os
import random
import zlib
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target to one prompt."""

    category: str
    temperature: float
    prompt_ids: list[int]
    output_ids: list[int]
    seed: int = 0  # of the sampling noise; without meaning at T = 0


def read_answers(path: Path) -> list[Answer]:
    """Read `{category, temperature, seed, prompt_ids, output_ids}` lines of a .jsonl.gz file."""
    with gzip.open(path, "rt") as lines:
        return [_answer(line) for line in lines]


def append_answers(path: Path, answers: Seq[Answer]) -> None:
    """Add lines to a .jsonl.gz file, as one gzip member that is on disk when this returns."""
    with path.open("ab") as file:
        file.write(_packed(answers))
        file.flush()
        os.fsync(file.fileno())


def recover_answers(path: Path) -> list[Answer]:
    """Read a file whose writer may have been killed, and cut it behind its last whole line."""
    text, is_whole = _unpack(path.read_bytes())
    if not is_whole:
        text = text[: text.rfind(b"\n") + 1]
    answers = [_answer(line) for line in text.splitlines()]
    if not is_whole or not text.endswith(b"\n"):
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(_packed(answers))
        os.replace(partial, path)
    return answers


def split_answers(
    answers: Seq[Answer], num_dev: int, seed: int
) -> tuple[list[Answer], list[Answer]]:
    """Hold out whole prompts until `num_dev` answers or more are held out; returns (dev, train).

    Raises ValueError if nothing is left to train on.
    """
    by_prompt: dict[str, list[Answer]] = {}
    for answer in answers:
        by_prompt.setdefault(json.dumps(answer.prompt_ids), []).append(answer)
    prompts = sorted(by_prompt)
    random.Random(seed).shuffle(prompts)
    dev: list[Answer] = []
    while len(dev) < num_dev and prompts:
        dev += by_prompt[prompts.pop(0)]
    if not prompts:
        raise ValueError(f"holding out {num_dev} answers leaves none of {len(answers)} to train on")
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


def _answer(line: str | bytes) -> Answer:
    record = json.loads(line)
    return Answer(
        record["category"],
        record["temperature"],
        record["prompt_ids"],
        record["output_ids"],
        record.get("seed", 0),
    )


def _packed(answers: Seq[Answer]) -> bytes:
    return gzip.compress("".join(json.dumps(asdict(a)) + "\n" for a in answers).encode())


def _unpack(packed: bytes) -> tuple[bytes, bool]:
    """As much text as can be read, and whether that is all."""
    text = b""
    while packed:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            text += member.decompress(packed)
        except zlib.error:
            return text, False
        if not member.eof:
            return text, False
        packed = member.unused_data
    return text, True
