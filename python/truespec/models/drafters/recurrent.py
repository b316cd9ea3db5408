"""What drafters that go token by token have in common: a hidden state and the next token go in.

EAGLE and MTP heads differ in how they join the two and in what they carry on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from truespec.batch import ModelOutput
from truespec.kernels.api import AttentionRows, KVBuffers, PackedLinear, Weight
from truespec.kernels.reference_weights import narrow
from truespec.models.config import ModelConfig
from truespec.models.drafters.checkpoint import DrafterCheckpoint
from truespec.models.llama import CausalLM


class RecurrentDrafter(ABC):
    """Row i reads the hidden state of position i and token i + 1, and predicts token i + 2.

    Attributes:
        layer: sizes of its layers.
        capture: target layers it reads; empty where the final hidden state is enough.
        target_ids: [DV] int64 target id of every draft id, `None` for the identity.
    """

    layer: ModelConfig
    capture: tuple[int, ...]
    target_ids: Tensor | None

    @abstractmethod
    def inputs(self, output: ModelOutput, rows: Tensor) -> Tensor:
        """[n, H] fp32 hidden states of the target at `rows` ([n] int64), ready for `forward`."""

    @abstractmethod
    def forward(
        self, hidden: Tensor, token_ids: Tensor, rows: AttentionRows, kv: KVBuffers
    ) -> Tensor:
        """Run the layers, writing draft K/V.

        Args:
            hidden: [n, H] fp32 of `inputs`, or the carried state of the step before.
            token_ids: [n] int64 target ids of the tokens after them.

        Returns the carried state [n, H] fp32.
        """

    @abstractmethod
    def logits(self, carried: Tensor) -> Tensor:
        """[n, H] carried states -> [n, DV] fp32 logits of the token after the one they read."""


def own_head(
    checkpoint: DrafterCheckpoint, name: str, target: CausalLM, ids: Tensor | None
) -> PackedLinear:
    """The drafter's head; the target's (its rows `ids`) where it has none or a copy of that."""
    size = target.config.vocab_size if ids is None else len(ids)
    if checkpoint.has(name):
        weight = checkpoint.stored(name, (size, target.config.hidden_size))
        if ids is not None or not is_same(weight, target.head_weight):
            return target.kernels.linear(narrow(weight, checkpoint.weight_type))
    return target.head if ids is None else target.head_rows(ids, checkpoint.weight_type)


def own_embedding(checkpoint: DrafterCheckpoint, name: str, target: CausalLM) -> Weight:
    """The drafter's embedding; the target's where it has none or a copy of that."""
    if checkpoint.has(name):
        weight = checkpoint.stored(name, (target.config.vocab_size, target.config.hidden_size))
        if not is_same(weight, target.embed_weight):
            return weight
    return target.embed_weight


def is_same(a: Weight, b: Weight) -> bool:
    """Two weights are equal, type included."""
    return a.type == b.type and a.shape == b.shape and torch.equal(a.data, b.data)
