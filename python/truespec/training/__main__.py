"""`truespec train collect | dspark | calibrate`; only parses options.

The target of `dspark` is a directory in Hugging Face's layout: `truespec convert` writes one.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from .config import Batching, Collecting, DSparkLoss, DSparkShape, LoopConfig

AnyOptions = DSparkShape | Batching | Collecting | DSparkLoss | LoopConfig
Options = TypeVar("Options", bound=AnyOptions)


def main() -> None:
    """Every field of an option class is a flag; its default is the class's own."""
    parser = argparse.ArgumentParser(prog="truespec train", description=__doc__)
    stages = parser.add_subparsers(required=True, metavar="STAGE")
    collect = stages.add_parser("collect", help="answers -> features of the target")
    collect.add_argument("--model", required=True, help="path or name of the target")
    collect.add_argument("--layers", type=_layer_ids, default=DSparkShape().target_layer_ids)
    _add_flags(collect, ("answers", "cache"), (Collecting,))
    collect.set_defaults(run=_collect)
    dspark = stages.add_parser("dspark", help="features -> DSpark drafter")
    groups = (DSparkShape, Batching, DSparkLoss, LoopConfig)
    _add_flags(dspark, ("answers", "target", "cache", "run_dir"), groups)
    dspark.set_defaults(run=_train_dspark)
    calibrate = stages.add_parser("calibrate", help="fit a DSpark checkpoint's confidences")
    _add_flags(calibrate, ("checkpoint", "target", "cache"), ())
    calibrate.add_argument("--num-answers", type=int, default=200)
    calibrate.set_defaults(run=_calibrate)
    args = parser.parse_args()
    args.run(args)


def _collect(args: argparse.Namespace) -> None:
    from truespec.config import EngineConfig
    from truespec.llm import LLM

    from .collect import collect_features

    options = _read_flags(args, Collecting)
    target = LLM(EngineConfig(model_path=args.model))
    collect_features(target, args.answers, args.cache, args.layers, options)


def _train_dspark(args: argparse.Namespace) -> None:
    from .stages import train_dspark

    train_dspark(
        args.answers,
        args.target,
        args.cache,
        args.run_dir,
        shape=_read_flags(args, DSparkShape),
        batching=_read_flags(args, Batching),
        loss=_read_flags(args, DSparkLoss),
        config=_read_flags(args, LoopConfig),
    )


def _calibrate(args: argparse.Namespace) -> None:
    from .calibrate import calibrate_dspark

    calibrate_dspark(args.checkpoint, args.target, args.cache, num_answers=args.num_answers)


def _add_flags(
    parser: argparse.ArgumentParser, paths: tuple[str, ...], groups: tuple[type[AnyOptions], ...]
) -> None:
    for name in paths:
        parser.add_argument("--" + name.replace("_", "-"), type=Path, required=True)
    for group in groups:
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
