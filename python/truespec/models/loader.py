"""From a path to a model in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from truespec.kernels.api import KernelSet, Weight
from truespec.utils.model_path import resolve_model_path

from .checkpoint import Checkpoint, SafetensorsCheckpoint
from .config import ModelConfig, read_config
from .fields import CheckpointError
from .gguf_checkpoint import GGUFCheckpoint
from .layer_weights import read_layer, stack_shape
from .llama import CausalLM

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def open_checkpoint(path: Path, dtype: str = "auto") -> tuple[Checkpoint, ModelConfig]:
    """The tensors and the config of a GGUF file or a Hugging Face directory.

    Raises:
        CheckpointError: it is neither, or not built.
    """
    if path.is_dir():
        config = read_config(path)
        return SafetensorsCheckpoint(path, dtype), config
    if path.is_file():
        checkpoint = GGUFCheckpoint(path, dtype)
        return checkpoint, checkpoint.config
    raise CheckpointError(f"{path} does not exist")


def load_model(name: str | Path, kernels: KernelSet, *, dtype: str = "auto") -> CausalLM:
    """Read a model and pack it for `kernels`. Shows its progress on a terminal.

    Args:
        name: see `resolve_model_path`.
        dtype: "auto" keeps the stored types; "float32", "bfloat16" or "float16" convert.

    Raises:
        CheckpointError: something is missing, left over, misshapen or not built.
        FileNotFoundError: there is no such path or package.
    """
    checkpoint, config = open_checkpoint(resolve_model_path(name), dtype)
    console = Console(stderr=True)
    layers = [
        read_layer(checkpoint, f"model.layers.{index}.", config)
        for index in track(
            range(config.num_layers),
            description="Reading layers",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    ]
    embed_weight = checkpoint.weight(EMBED, (config.vocab_size, config.hidden_size))
    head_weight = _head(checkpoint, config, embed_weight)
    norm = checkpoint.vector(NORM, config.hidden_size)
    checkpoint.check_all_used()
    shape = stack_shape(config)
    model = CausalLM(
        config,
        kernels,
        shape=shape,
        embed_weight=embed_weight,
        stack=kernels.decoder_stack(layers, shape),
        norm=norm,
        head_weight=head_weight,
    )
    checkpoint.drop_pages()
    return model


def _head(checkpoint: Checkpoint, config: ModelConfig, embed_weight: Weight) -> Weight:
    """The head's weight; a tied checkpoint may store a copy, which must be one."""
    shape = (config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        return checkpoint.weight(HEAD, shape)
    if checkpoint.has(HEAD) and not torch.equal(
        checkpoint.weight(HEAD, shape).data, embed_weight.data
    ):
        raise CheckpointError(f"{HEAD} differs from {EMBED}, although tie_word_embeddings is true")
    return embed_weight
