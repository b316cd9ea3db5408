"""`truespec train answers | collect | dspark | calibrate`; only parses options.

`dspark` takes --model, --prompts and --out and runs every stage, or --answers, --target, --cache
and --run-dir and trains only. A --target is a directory in Hugging Face's layout: `truespec
convert` writes one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from .config import (
    Answering,
    Batching,
    Calibrating,
    Collecting,
    DSparkLoss,
    DSparkShape,
    LoopConfig,
)

AnyOptions = Answering | DSparkShape | Batching | Calibrating | Collecting | DSparkLoss | LoopConfig
Options = TypeVar("Options", bound=AnyOptions)

WHOLE = ("model", "prompts", "out")
TRAINING_ONLY = ("answers", "target", "cache", "run_dir")
MODEL = "directory, GGUF file, or the name of a packaged model"
FROM_TARGET = "default: what fits the target"
SHAPE_FROM_TARGET = ("target_layer_ids", "num_kv_heads", "draft_vocab_size")


def main(argv: Sequence[str] | None = None) -> None:
    """Every field of an option class is a flag; its default is the class's own.

    Raises SystemExit for wrong flags, and with the reason for what a user can mend.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"truespec train: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="truespec train", description=__doc__)
    stages = parser.add_subparsers(required=True, metavar="STAGE", dest="stage")
    answers = stages.add_parser("answers", help="prompts -> answers of the target")
    answers.set_defaults(run=_answer)
    answers.add_argument("--model", required=True, help=MODEL)
    _add_paths(answers, ("prompts", "out"), required=True)
    _add_flags(answers, Answering)
    collect = stages.add_parser("collect", help="answers -> features of the target")
    collect.set_defaults(run=_collect)
    collect.add_argument("--model", required=True, help=MODEL)
    _add_paths(collect, ("answers", "cache"), required=True)
    collect.add_argument("--layers", type=_int_list, help=FROM_TARGET)
    _add_flags(collect, Collecting)
    dspark = stages.add_parser("dspark", help="everything, or features -> DSpark drafter")
    dspark.set_defaults(run=_train_dspark)
    dspark.add_argument("--model", help=MODEL)
    _add_paths(dspark, (*WHOLE[1:], *TRAINING_ONLY), required=False)
    _add_flags(dspark, DSparkShape)
    _add_flags(dspark, Answering, Collecting, Batching, DSparkLoss, LoopConfig)
    calibrate = stages.add_parser("calibrate", help="fit a checkpoint's confidences")
    calibrate.set_defaults(run=_calibrate)
    _add_paths(calibrate, ("checkpoint", "target", "cache"), required=True)
    _add_flags(calibrate, Calibrating)
    return parser


def _answer(args: argparse.Namespace) -> None:
    from .stages import answer

    answer(args.model, args.prompts, args.out, _read_flags(args, Answering))


def _collect(args: argparse.Namespace) -> None:
    from .stages import collect, default_shape, model_config

    layers = args.layers or default_shape(model_config(args.model)).target_layer_ids
    collect(args.model, args.answers, args.cache, layers, _read_flags(args, Collecting))


def _train_dspark(args: argparse.Namespace) -> None:
    from .pipeline import Layout, train_everything
    from .stages import default_shape, model_config, train_dspark

    names = _given_mode(args)
    shape = default_shape(model_config(args.model if names is WHOLE else args.target))
    shape = _read_flags(args, DSparkShape, defaults=shape)
    batching, loss = _read_flags(args, Batching), _read_flags(args, DSparkLoss)
    config = _read_flags(args, LoopConfig)
    if names is TRAINING_ONLY:
        paths = (args.answers, args.target, args.cache, args.run_dir)
        train_dspark(*paths, shape=shape, batching=batching, loss=loss, config=config)
        return
    train_everything(
        args.model,
        args.prompts,
        Layout(args.out),
        answering=_read_flags(args, Answering),
        collecting=_read_flags(args, Collecting),
        shape=shape,
        batching=batching,
        loss=loss,
        config=config,
    )


def _calibrate(args: argparse.Namespace) -> None:
    from .calibrate import calibrate_dspark

    num_answers = _read_flags(args, Calibrating).num_answers
    calibrate_dspark(args.checkpoint, args.target, args.cache, num_answers=num_answers)


def _given_mode(args: argparse.Namespace) -> tuple[str, ...]:
    """WHOLE or TRAINING_ONLY, whichever is given completely and alone."""
    given = {name for name in (*WHOLE, *TRAINING_ONLY) if getattr(args, name) is not None}
    if given == set(WHOLE):
        return WHOLE
    if given == set(TRAINING_ONLY):
        _refuse(args, Answering, Collecting)
        return TRAINING_ONLY
    whole, only = (" ".join(_flag(name) for name in names) for names in (WHOLE, TRAINING_ONLY))
    raise ValueError(f"dspark needs {whole} for every stage, or {only} to train only")


def _refuse(args: argparse.Namespace, *groups: type[AnyOptions]) -> None:
    for name in (field.name for group in groups for field in fields(group)):
        if getattr(args, name) is not None:
            raise ValueError(f"{_flag(name)} has no effect where answers and cache are given")


def _add_paths(parser: argparse.ArgumentParser, names: tuple[str, ...], *, required: bool) -> None:
    for name in names:
        parser.add_argument(_flag(name), type=Path, required=required)


def _add_flags(parser: argparse.ArgumentParser, *groups: type[AnyOptions]) -> None:
    """Flags that were not given read as None."""
    for group in groups:
        for field in fields(group):
            is_free = group is DSparkShape and field.name in SHAPE_FROM_TARGET
            text = FROM_TARGET if is_free else f"default: {field.default}"
            parser.add_argument(_flag(field.name), type=_kind(field.default), help=text)


def _read_flags(
    args: argparse.Namespace, group: type[Options], *, defaults: Options | None = None
) -> Options:
    values = {field.name: getattr(args, field.name) for field in fields(group)}
    given = {name: value for name, value in values.items() if value is not None}
    return replace(defaults or group(), **given)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind(default: object) -> Callable[[str], object]:
    """What parses a flag of a field with this default."""
    if isinstance(default, tuple):
        return _float_list if isinstance(default[0], float) else _int_list
    assert isinstance(default, int | float), f"no flag is made for {default!r}"
    return type(default)


def _int_list(text: str) -> tuple[int, ...]:
    """`28,29` -> (28, 29)."""
    return tuple(int(part) for part in text.split(","))


def _float_list(text: str) -> tuple[float, ...]:
    """`0,0.6` -> (0.0, 0.6)."""
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
