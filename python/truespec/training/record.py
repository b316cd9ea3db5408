"""options.json: what a run was started with; it guards resuming and feeds the card."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from .algorithms import TrainingOptions

FIXED = ("algorithm", "shape", "init_from")  # what the saved weights depend on


def options_of(
    algorithm: str, options: TrainingOptions, init_from: Path | None
) -> dict[str, object]:
    """The part of options.json that every training has."""
    return {
        "algorithm": algorithm,
        "init_from": None if init_from is None else str(init_from),
        "shape": asdict(options.shape),
        "batching": asdict(options.batching),
        "loss": asdict(options.loss),
        "loop": asdict(options.loop),
    }


def check_options(run_dir: Path, options: Mapping[str, object]) -> None:
    """Raise ValueError if the directory holds a training of another drafter."""
    if not (run_dir / "options.json").exists():
        return
    old, new = read_options(run_dir), _plain(options)
    for name in FIXED:
        if old[name] != new[name]:
            raise ValueError(
                f"{run_dir} holds a training with {name} {old[name]}, this one has {new[name]}: "
                "use another directory"
            )


def write_options(run_dir: Path, options: Mapping[str, object]) -> None:
    """Record the options of a run that starts or goes on; raises as `check_options`."""
    check_options(run_dir, options)
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(run_dir / "options.json", json.dumps(_plain(options), indent=2) + "\n")


def read_options(run_dir: Path) -> dict[str, object]:
    """What `write_options` wrote last."""
    options: dict[str, object] = json.loads((run_dir / "options.json").read_text())
    return options


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; one that says the same already is left alone."""
    if path.exists() and path.read_text() == text:
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _plain(options: Mapping[str, object]) -> dict[str, object]:
    """As it is read back: tuples are lists."""
    plain: dict[str, object] = json.loads(json.dumps(options))
    return plain
