"""Writing a checkpoint directory so that it is there whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_checkpoint(path: Path, tensors: dict[str, Tensor], config: Mapping[str, object]) -> None:
    """Write `config.json` and `model.safetensors`; an older checkpoint at `path` is replaced."""
    partial, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "model.safetensors")
    (partial / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)
