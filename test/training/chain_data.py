"""A tiny target with the engine's own copy, and sequences for training drafters of chains."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dense_drafters import tiny_target
from tiny_drafters import HIDDEN, VOCAB
from truespec.models.llama import CausalLM
from truespec.training.cache import FeatureCache, FeatureSequence, write_shard
from truespec.training.chain_task import ChainData
from truespec.training.chains import ChainBatch, pack_chains
from truespec.training.target import load_target

LAYERS = (0, 1, 2)
DRAFT_IDS = torch.arange(4, 44)


@dataclass(frozen=True, slots=True)
class Setting:
    """The same target for the engine and for training."""

    engine: CausalLM
    data: ChainData


def make_setting(root: Path, num_sequences: int = 3, length: int = 18) -> Setting:
    """`num_sequences` random answers; the target is sure of every recorded token."""
    engine = tiny_target(root / "target")
    target = load_target(root / "target")
    head = target.head.float()
    sequences = [random_sequence(head, length + n % 4, 4 + n % 3, n) for n in range(num_sequences)]
    write_shard(root / "train-00000.safetensors", sequences, LAYERS)
    cache = FeatureCache(root, "train")
    return Setting(engine, ChainData(target, DRAFT_IDS, cache, cache))


def random_sequence(head: Tensor, length: int, prompt: int, seed: int) -> FeatureSequence:
    """Random tokens of the draft vocabulary; the teacher's argmax is the next token."""
    generator = torch.Generator().manual_seed(seed)
    ids = DRAFT_IDS[torch.randint(0, len(DRAFT_IDS), (length,), generator=generator)]
    sure = torch.linalg.pinv(head) @ (30.0 * one_hot(ids.roll(-1), VOCAB).T.float())
    noise = 0.1 * torch.randn(HIDDEN, length, generator=generator)
    return FeatureSequence(
        ids.int(),
        (torch.arange(length) >= prompt).to(torch.uint8),
        torch.randn(length, len(LAYERS), HIDDEN, generator=generator).bfloat16(),
        (sure + noise).T.bfloat16(),
        temperature=0.0,
        category="qa",
    )


def counting_batch() -> ChainBatch:
    """Two sequences whose token ids are 100 + position and 200 + position, and three chains."""
    sequences = [
        FeatureSequence(
            torch.arange(first, first + length).int(),
            (torch.arange(length) >= 3).to(torch.uint8),
            torch.zeros(length, len(LAYERS), HIDDEN),
            torch.zeros(length, HIDDEN),
            temperature=0.0,
            category="qa",
        )
        for first, length in ((100, 8), (200, 7))
    ]
    return pack_chains(sequences, [np.array([2, 5]), np.array([3])])


def widen(model: torch.nn.Module) -> None:
    """Random weights wide enough that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                noise / parameter.shape[-1] ** 0.5 if noise.ndim == 2 else 1 + noise / 5
            )
