"""The feature cache: what a frozen target computed over recorded answers, read back for training.

A cache is a directory of shards `train-00000.safetensors`, `dev-00000.safetensors`, ... A shard
packs n sequences (prompt, then answer), N tokens in total; every drafter's trainer reads it.
| tensor | shape, dtype | meaning |
| --- | --- | --- |
| token_ids | [N] int32 | tokens of all sequences, one after the other |
| loss_mask | [N] uint8 | 1 on tokens the target generated, 0 on the prompt |
| cu_seqlens | [n + 1] int64 | first token of each sequence |
| temperature | [n] fp32 | temperature the answer was sampled at |
| taps | [N, m, H] bf16 | output of layer `layers[j]`: HF `hidden_states[layers[j] + 1]` |
| last | [N, H] bf16 | hidden after the final norm; `lm_head(last[i])` = raw logits of token i + 1 |
The safetensors metadata holds `layers` (JSON list of m layer numbers, from 0) and `categories`
(JSON list of n names).
"""

import json
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .disk import naming_a_full_disk


@dataclass(frozen=True, slots=True)
class FeatureSequence:
    """One recorded sequence of S tokens; the tensors are views into a memory-mapped shard."""

    token_ids: Tensor  # [S] int32
    loss_mask: Tensor  # [S] uint8
    taps: Tensor  # [S, m, H] bf16
    last: Tensor  # [S, H] bf16
    temperature: float
    category: str

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def answer_start(self) -> int:
        """Index of the first generated token."""
        return int(self.loss_mask.argmax())


class FeatureCache:
    """All shards of one split in a directory, as an indexable collection of sequences.

    `layers` are the layer numbers to read, a subset of those recorded (None reads all). Raises
    FileNotFoundError without shards and ValueError if a shard lacks a layer.
    """

    def __init__(self, root: Path, split: str, layers: Seq[int] | None = None) -> None:
        paths = sorted(root.glob(f"{split}-*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"no {split}-*.safetensors in {root}")
        self._shards = [_open_shard(path, layers) for path in paths]
        self._index = [
            (n, i) for n, shard in enumerate(self._shards) for i in range(len(shard.categories))
        ]

    @property
    def layers(self) -> list[int]:
        """Layer number of every column of `taps`."""
        return self._shards[0].layers

    @property
    def categories(self) -> list[str]:
        """Category of every sequence."""
        return [name for shard in self._shards for name in shard.categories]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return sum(int(shard.tensors["cu_seqlens"][-1]) for shard in self._shards)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[FeatureSequence]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> FeatureSequence:
        shard_index, i = self._index[index]
        shard = self._shards[shard_index]
        t = shard.tensors
        rows = slice(int(t["cu_seqlens"][i]), int(t["cu_seqlens"][i + 1]))
        taps = t["taps"][rows]
        if shard.columns != list(range(taps.shape[1])):
            taps = taps[:, shard.columns]
        return FeatureSequence(
            t["token_ids"][rows],
            t["loss_mask"][rows],
            taps,
            t["last"][rows],
            float(t["temperature"][i]),
            shard.categories[i],
        )


def write_shard(path: Path, sequences: Seq[FeatureSequence], layers: Seq[int]) -> None:
    """Write one shard; it appears under its name only when complete."""
    lens = [s.num_tokens for s in sequences]
    tensors = {
        "token_ids": torch.cat([s.token_ids for s in sequences]).to(torch.int32),
        "loss_mask": torch.cat([s.loss_mask for s in sequences]).to(torch.uint8),
        "cu_seqlens": torch.tensor([0, *lens], dtype=torch.int64).cumsum(0),
        "temperature": torch.tensor([s.temperature for s in sequences], dtype=torch.float32),
        "taps": torch.cat([s.taps for s in sequences]).to(torch.bfloat16),
        "last": torch.cat([s.last for s in sequences]).to(torch.bfloat16),
    }
    categories = [s.category for s in sequences]
    metadata = {"layers": json.dumps(list(layers)), "categories": json.dumps(categories)}
    partial = path.with_name(path.name + ".partial")
    with naming_a_full_disk(partial):
        save_file(tensors, partial, metadata=metadata)
    os.replace(partial, path)


@dataclass(frozen=True, slots=True)
class _Shard:
    tensors: dict[str, Tensor]
    categories: list[str]
    layers: list[int]
    columns: list[int]  # columns of `taps` that were asked for


def _open_shard(path: Path, wanted: Seq[int] | None) -> _Shard:
    with safe_open(path, framework="pt") as f:
        metadata = f.metadata()
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  safe_open is no dict
    recorded: list[int] = json.loads(metadata["layers"])
    layers = recorded if wanted is None else list(wanted)
    missing = [layer for layer in layers if layer not in recorded]
    if missing:
        raise ValueError(f"{path.name} has layers {recorded}, but not {missing}")
    columns = [recorded.index(layer) for layer in layers]
    return _Shard(tensors, json.loads(metadata["categories"]), layers, columns)
