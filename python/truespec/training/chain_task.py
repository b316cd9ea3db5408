"""What training EAGLE-3 and MTP drafters has in common: batches, loss, figures, and the data."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from .blocks import category_weights
from .cache import FeatureCache
from .chain_loss import chain_loss, draw_chains, measure_chains
from .chains import ChainBatch
from .config import Batching
from .data import load_data
from .eagle_config import ChainLoss
from .target import Target

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class ChainData:
    """What a drafter of chains is trained on and measured with."""

    target: Target
    draft_vocab: Tensor  # [DV] int64, ascending
    train: FeatureCache
    dev: FeatureCache


def load_chain_data(
    answers_path: Path, target_dir: Path, cache_dir: Path, *, layers: tuple[int, ...], size: int
) -> ChainData:
    """Target, features of `layers`, and the `size` ids the training answers use most.

    Raises ValueError if the target has fewer ids.
    """
    data = load_data(answers_path, target_dir, cache_dir, layers)
    return ChainData(data.target, data.draft_vocab(size), data.train, data.dev)


class ChainTask(ABC, Generic[Model]):
    """A batch is a function of (seed, index): resuming repeats nothing."""

    def __init__(
        self, model: Model, data: ChainData, *, batching: Batching, loss: ChainLoss
    ) -> None:
        self.model, self.data = model, data
        self.batching, self.loss_config = batching, loss
        self.device = torch.device("cpu")
        self.embedding, self.draft_vocab = data.target.embedding, data.draft_vocab
        self.draft_head = data.target.head[data.draft_vocab].to(torch.bfloat16)  # [DV, H]
        self._draw_weights = category_weights(data.train.categories, batching.category_balance)

    def to(self, device: torch.device) -> None:
        """Compute on a device from now on."""
        self.device = device
        self.model.to(device)
        self.embedding, self.draft_head = self.embedding.to(device), self.draft_head.to(device)
        self.draft_vocab = self.draft_vocab.to(device)

    @abstractmethod
    def forward(self, batch: ChainBatch) -> list[Tensor]:
        """Post-norm hidden of every draft: per step [alive chains, H]."""

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write the checkpoint as a directory that appears at `path` only when complete."""

    def loss(self, batch_index: int, progress: float) -> tuple[Tensor, dict[str, float]]:
        """Loss of one batch, and its metrics."""
        batch = draw_chains(
            self.data.train,
            self._draw_weights,
            self.batching,
            batch_index,
            decay=self.loss_config.decay,
        ).to(self.device)
        return chain_loss(
            self.forward(batch),
            batch,
            draft_head=self.draft_head,
            draft_vocab=self.draft_vocab,
            config=self.loss_config,
            progress=progress,
        )

    def measure(self) -> dict[str, float]:
        """Figures on the held-out sequences."""
        return measure_chains(self.forward, self.draft_head, self.draft_vocab, self.data.dev)


def layer_fields(target: Target, num_kv_heads: int) -> dict[str, object]:
    """What config.json says of a drafter whose layers have the target's sizes."""
    heads = int(target.number("num_attention_heads"))
    return {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "intermediate_size": int(target.number("intermediate_size")),
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": int(str(target.config.get("head_dim") or target.hidden_size // heads)),
        "hidden_act": "silu",
        "rms_norm_eps": target.number("rms_norm_eps"),
        "rope_theta": target.rope_theta,
        "vocab_size": target.embedding.shape[0],
        "num_target_layers": int(target.number("num_hidden_layers")),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
