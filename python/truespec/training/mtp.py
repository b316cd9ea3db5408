"""The training task of chained MTP heads: one head per draft step, each with its own loss."""

from pathlib import Path

import torch
from torch import Tensor

from truespec.models.config import ModelConfig

from .cache import FeatureCache
from .chain_start import start_heads
from .chain_task import ChainTask, layer_fields, load_chain_data
from .chains import ChainBatch
from .checkpoint_dir import stored_tensors, write_checkpoint
from .config import Batching
from .dspark_model import dims_of
from .eagle_config import ChainLoss, MtpShape
from .mtp_model import MtpModel, forward_heads


def default_mtp_shape(target: ModelConfig) -> MtpShape:
    """A shape that fits the target: its KV heads, and no more draft ids than it has ids."""
    return MtpShape(
        num_kv_heads=target.num_kv_heads,
        draft_vocab_size=min(MtpShape().draft_vocab_size, target.vocab_size),
        target_layer_ids=(max(target.num_layers - 3, 0),),
    )


class MtpTask(ChainTask[MtpModel]):
    """What the loop trains."""

    def forward(self, batch: ChainBatch) -> list[Tensor]:
        return forward_heads(self.model, batch, self.embedding)

    def export(self, path: Path) -> None:
        target, shape = self.data.target, self.model.shape
        num_target_layers = int(target.number("num_hidden_layers"))
        tensors: dict[str, Tensor] = {}
        for j, head in enumerate(self.model.heads):
            prefix = f"model.layers.{num_target_layers + j}."
            tensors |= {prefix + name: t for name, t in head.named_parameters()}
        config = layer_fields(target, shape.num_kv_heads) | {
            "architectures": ["LlamaForCausalLMNextN"],
            "num_hidden_layers": num_target_layers,
            "num_nextn_predict_layers": shape.num_heads,
            "draft_vocab_size": shape.draft_vocab_size,
        }
        write_checkpoint(path, stored_tensors(tensors, self.data.draft_vocab), config)


def build_mtp_task(
    answers_path: Path,
    target_dir: Path,
    cache_dir: Path,
    *,
    shape: MtpShape,
    batching: Batching,
    loss: ChainLoss,
) -> MtpTask:
    """What trains MTP heads on a feature cache with the layers `target_layer_ids`."""
    data = load_chain_data(
        answers_path, target_dir, cache_dir, layers=(), size=shape.draft_vocab_size
    )
    torch.manual_seed(batching.seed)
    model = MtpModel(shape, dims_of(data.target))
    start_heads(model, data.target, FeatureCache(cache_dir, "train", shape.target_layer_ids))
    return MtpTask(model, data, batching=batching, loss=loss)
