"""`python -m truespec.training dspark`: train a drafter from a feature cache. Parses options."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from .config import Batching, DSparkLoss, DSparkShape, LoopConfig
from .stages import train_dspark

AnyOptions = DSparkShape | Batching | DSparkLoss | LoopConfig
Options = TypeVar("Options", bound=AnyOptions)


def main() -> None:
    """Every field of the option classes is a flag; its default is the class's own."""
    parser = argparse.ArgumentParser(prog="python -m truespec.training")
    dspark = parser.add_subparsers(required=True).add_parser("dspark")
    for name in ("answers", "target", "cache", "run"):
        dspark.add_argument(f"--{name}", type=Path, required=True)
    dspark.add_argument("--warm-layers", type=_layer_ids, default=(28, 29))
    for group in (DSparkShape, Batching, DSparkLoss, LoopConfig):
        _add_flags(dspark, group)
    args = parser.parse_args()
    train_dspark(
        args.answers,
        args.target,
        args.cache,
        args.run,
        shape=_read_flags(args, DSparkShape),
        warm_layers=args.warm_layers,
        batching=_read_flags(args, Batching),
        loss=_read_flags(args, DSparkLoss),
        config=_read_flags(args, LoopConfig),
    )


def _add_flags(parser: argparse.ArgumentParser, group: type[AnyOptions]) -> None:
    for field in fields(group):
        kind = _layer_ids if isinstance(field.default, tuple) else type(field.default)
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=field.default)


def _read_flags(args: argparse.Namespace, group: type[Options]) -> Options:
    return group(**{field.name: getattr(args, field.name) for field in fields(group)})


def _layer_ids(text: str) -> tuple[int, ...]:
    """`28,29` -> (28, 29); empty text -> ()."""
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    main()
