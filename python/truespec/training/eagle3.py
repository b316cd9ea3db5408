"""The EAGLE-3 training task: draft steps unrolled as in serving (arXiv 2503.01840, section 3)."""

from pathlib import Path

import torch
from torch import Tensor

from truespec.models.config import ModelConfig

from .chain_start import start_midlayer
from .chain_task import ChainTask, layer_fields, load_chain_data
from .chains import ChainBatch
from .checkpoint_dir import stored_tensors, write_checkpoint
from .config import Batching
from .dspark_model import dims_of
from .eagle3_model import Eagle3Model, forward_chains
from .eagle_config import ChainLoss, Eagle3Shape
from .start import measure_tap_scale


def default_eagle3_shape(target: ModelConfig) -> Eagle3Shape:
    """A shape that fits the target: the reference's three layers, the target's KV heads."""
    n = target.num_layers
    return Eagle3Shape(
        target_layer_ids=tuple(sorted({min(1, n - 1), max(n // 2 - 1, 0), max(n - 3, 0)})),
        num_kv_heads=target.num_kv_heads,
        draft_vocab_size=min(Eagle3Shape().draft_vocab_size, target.vocab_size),
    )


class Eagle3Task(ChainTask[Eagle3Model]):
    """What the loop trains."""

    def forward(self, batch: ChainBatch) -> list[Tensor]:
        return forward_chains(self.model, batch, self.embedding)

    def export(self, path: Path) -> None:
        target, shape = self.data.target, self.model.shape
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        tensors["fc.weight"] = tensors["fc.weight"] / self.model.tap_scale
        config = layer_fields(target, shape.num_kv_heads) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": shape.draft_vocab_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(shape.target_layer_ids),
                "use_aux_hidden_state": True,
            },
        }
        write_checkpoint(path, stored_tensors(tensors, self.data.draft_vocab), config)


def build_eagle3_task(
    answers_path: Path,
    target_dir: Path,
    cache_dir: Path,
    *,
    shape: Eagle3Shape,
    batching: Batching,
    loss: ChainLoss,
) -> Eagle3Task:
    """What trains an EAGLE-3 drafter on a feature cache with the layers `target_layer_ids`."""
    data = load_chain_data(
        answers_path,
        target_dir,
        cache_dir,
        layers=shape.target_layer_ids,
        size=shape.draft_vocab_size,
    )
    torch.manual_seed(batching.seed)
    model = Eagle3Model(shape, dims_of(data.target))
    model.tap_scale.copy_(measure_tap_scale(data.train))
    start_midlayer(model, data.target, data.train)
    return Eagle3Task(model, data, batching=batching, loss=loss)
