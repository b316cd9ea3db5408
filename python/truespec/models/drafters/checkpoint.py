"""A drafter's directory: its tensors under this project's names, and its config as one table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from truespec.kernels.api import Weight
from truespec.kernels.reference_weights import narrow
from truespec.models.checkpoint import SafetensorsCheckpoint, StoredTensor
from truespec.models.config import ModelConfig
from truespec.models.fields import CheckpointError, Fields
from truespec.models.rope_config import read_rope

logger = logging.getLogger(__name__)

TABLES = (
    "text_config",
    "transformer_layer_config",
    "dflash_config",
    "eagle_config",
    "dspark_config",
)


class DrafterCheckpoint(SafetensorsCheckpoint):
    """Safetensors files whose names differ between dialects.

    Args:
        path: the directory.
        rename: this project's name of a stored tensor, `None` for one that is to be ignored
            (a copy of the target's own).
        weight_type: block type of the matrices that `weight` gives, see `narrow`.
    """

    def __init__(
        self,
        path: Path,
        rename: Callable[[str], str | None],
        weight_type: str | None = None,
    ) -> None:
        super().__init__(path)
        self.weight_type = weight_type
        self._stored: dict[str, str] = {}
        for stored in super()._names():
            name = rename(stored)
            if name is not None:
                self._stored[name] = stored

    def has(self, name: str) -> bool:
        return name in self._stored

    def weight(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix that is multiplied with, in as few bits as were asked for; see `Checkpoint`."""
        return narrow(self.stored(name, shape), self.weight_type)

    def stored(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix whose values are needed as they are stored; errors as `weight`."""
        return super().weight(name, shape)

    @property
    def own_names(self) -> set[str]:
        """All tensors, under this project's names."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a stored tensor, without reading it."""
        stored = self._stored[name]
        shape: list[int] = self._handles[self._files[stored]].get_slice(stored).get_shape()
        return tuple(shape)

    def integers(self, name: str, size: int) -> Tensor:
        """[size] int64, read as it is."""
        stored = self._stored[name]
        tensor: Tensor = self._handles[self._files[stored]].get_tensor(stored)
        if tensor.shape != (size,) or tensor.is_floating_point():
            raise CheckpointError(
                f"{self._source}: tensor {stored} is {list(tensor.shape)} {tensor.dtype}, "
                f"expected [{size}] whole numbers"
            )
        self._used.add(name)
        return tensor.long()

    def _own_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def _names(self) -> set[str]:
        return self.own_names

    def _load(self, name: str) -> StoredTensor:
        return super()._load(self._stored[name])


def tensor_names(path: Path) -> set[str]:
    """Names of all stored tensors of a directory."""
    return DrafterCheckpoint(path, lambda stored: stored).own_names


def read_fields(path: Path) -> Fields:
    """A drafter's config.json as one table, whatever its dialect.

    Nested tables win over the top level, and `dspark_<name>` at the top over all of them.

    Raises CheckpointError when it is missing or no JSON object.
    """
    config = Fields.read(path / "config.json").values
    places = [config]
    for name in TABLES:
        table = config.get(name)
        if isinstance(table, dict):
            places.append(table)
    prefix = "dspark_"
    places.append({k.removeprefix(prefix): v for k, v in config.items() if k.startswith(prefix)})
    merged: dict[str, object] = {}
    for place in places:
        merged.update({name: value for name, value in place.items() if value is not None})
    return Fields(merged, f"{path.name}/config.json")


def layer_config(fields: Fields, target: ModelConfig, has: Callable[[str], bool]) -> ModelConfig:
    """Sizes of a drafter's Llama-like layers.

    Args:
        fields: the drafter's config.
        target: gives vocabulary and context length, and must have the same hidden size.
        has: whether the first layer has a tensor of this name (biases, per-head norms).

    Raises CheckpointError naming both values where drafter and target do not fit.
    """
    check_fit(fields, target)
    heads = fields.integer("num_attention_heads")
    known = Fields(
        {"max_position_embeddings": target.context_length, **fields.values}, fields.source
    )
    return replace(
        target,
        family="drafter",
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", target.hidden_size // heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(known)[0],
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )


def check_fit(fields: Fields, target: ModelConfig) -> None:
    """Raise unless the sizes that drafter and target share are equal."""
    facts = (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_layers),
    )
    for name, theirs in facts:
        if fields.get(name) is not None and fields.integer(name) != theirs:
            raise CheckpointError(
                f"the drafter's {name} is {fields.get(name)}, the target's is {theirs}"
            )


def target_ids(checkpoint: DrafterCheckpoint, fields: Fields, target: ModelConfig) -> Tensor | None:
    """[DV] int64 target id of every draft id, `None` where the vocabularies are the same.

    The stored `d2t` holds offsets: target id = draft id + d2t[draft id].
    """
    vocab = target.vocab_size
    size = fields.integer("draft_vocab_size", vocab)
    if not checkpoint.has("d2t"):
        if size != vocab:
            raise CheckpointError(f"draft_vocab_size is {size} of {vocab}, but there is no d2t")
        return None
    offsets = checkpoint.integers("d2t", size)
    ids = offsets + offsets.new_ones(size).cumsum(0) - 1
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise CheckpointError(f"d2t reaches ids {int(ids.min())} to {int(ids.max())} of {vocab}")
    return None if size == vocab and bool((offsets == 0).all()) else ids


def target_layers(
    fields: Fields, name: str, shift: int, target: ModelConfig, *, last: bool
) -> tuple[int, ...]:
    """Captured target layers: id i is the output of layer i, -1 the embedding.

    Args:
        name, shift: the field, and what turns its convention into this one.
        last: whether the last layer's output may be captured.

    Raises CheckpointError for ids outside the target or out of order.
    """
    ids = tuple(i + shift for i in fields.ids(name))
    end = target.num_layers if last else target.num_layers - 1
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= end:
        raise CheckpointError(
            f"{fields.source}: {name} is {fields.get(name)}, expected ascending layers of a "
            f"target with {target.num_layers} layers"
        )
    logger.info(
        "%s: %s is %s: captures the outputs of target layers %s (-1: the embedding)",
        fields.source,
        name,
        fields.get(name),
        list(ids),
    )
    return ids


def refuse_windows(fields: Fields) -> None:
    """Raise for layers that attend to a window only."""
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and any(t != "full_attention" for t in layer_types):
        raise fields.error("layer_types", "full_attention only")
    if fields.get("use_sliding_window") and fields.get("sliding_window"):
        raise fields.error("sliding_window", "null (attention windows are not built)")


def refuse(fields: Fields, names: tuple[str, ...]) -> None:
    """Raise for fields that change a drafter's forward pass and are not built."""
    for name in names:
        if fields.get(name):
            raise fields.error(name, "nothing (it is not supported)")
