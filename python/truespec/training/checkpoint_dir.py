"""Writing a checkpoint directory so that it is there whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .disk import naming_a_full_disk


def write_checkpoint(path: Path, tensors: dict[str, Tensor], config: Mapping[str, object]) -> None:
    """Write `config.json` and `model.safetensors`; an older checkpoint at `path` is replaced."""
    partial, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    with naming_a_full_disk(partial):
        save_file(tensors, partial / "model.safetensors")
    (partial / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def stored_tensors(parameters: Mapping[str, Tensor], draft_vocab: Tensor) -> dict[str, Tensor]:
    """bf16 copies in host memory, and `d2t` [DV] int64 (target id - draft id)."""
    tensors = {name: t.detach().to("cpu", torch.bfloat16) for name, t in parameters.items()}
    draft_vocab = draft_vocab.cpu()
    return tensors | {"d2t": draft_vocab - torch.arange(len(draft_vocab))}
