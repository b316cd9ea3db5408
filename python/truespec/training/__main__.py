"""`truespec train answers | collect | dspark | dflash | eagle3 | mtp | calibrate | shrink | card`.

A drafter's command takes --target, --prompts and --out and runs every stage, or --answers,
--target, --cache and --run-dir and trains only. There the target is a directory in Hugging Face's
layout: `truespec convert` writes one. This file only parses options.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from .algorithms import ALGORITHMS, Algorithm, AnyLoss, AnyShape, TrainingFiles, TrainingOptions
from .config import (
    Answering,
    Batching,
    Calibrating,
    Collecting,
    DFlashShape,
    DSparkShape,
    LoopConfig,
)

AnyOptions = Answering | AnyShape | Batching | Calibrating | Collecting | AnyLoss | LoopConfig
Options = TypeVar("Options", bound=AnyOptions)

WHOLE = ("target", "prompts", "out")
TRAINING_ONLY = ("answers", "target", "cache", "run_dir")
MODEL = "directory, GGUF file, or the name of a packaged model"
FROM_TARGET = "default: what fits the target"
SHAPE_FROM_TARGET = ("target_layer_ids", "num_kv_heads", "draft_vocab_size")


def main(argv: Sequence[str] | None = None) -> None:
    """Every field of an option class is a flag; its default is the class's own.

    Raises SystemExit for wrong flags, and with the reason for what a user can mend.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(argv)
    args.command = shlex.join(["truespec", "train", *argv])
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
    _add_flags(answers, Answering())
    collect = stages.add_parser("collect", help="answers -> features of the target")
    collect.set_defaults(run=_collect)
    collect.add_argument("--model", required=True, help=MODEL)
    _add_paths(collect, ("answers", "cache"), required=True)
    collect.add_argument("--layers", type=_int_list, help="default: what any drafter here reads")
    _add_flags(collect, Collecting())
    for name, algorithm in ALGORITHMS.items():
        help_text = f"everything, or features -> {name} drafter"
        _add_training(stages.add_parser(name, help=help_text), name, algorithm)
    calibrate = stages.add_parser("calibrate", help="fit a checkpoint's confidences")
    calibrate.set_defaults(run=_calibrate)
    _add_paths(calibrate, ("checkpoint", "target", "cache"), required=True)
    _add_flags(calibrate, Calibrating())
    shrink = stages.add_parser("shrink", help="block drafter -> the same with fewer draft ids")
    shrink.set_defaults(run=_shrink)
    _add_paths(shrink, ("checkpoint", "answers", "out"), required=True)
    shrink.add_argument("--draft-vocab-size", type=int, required=True)
    card = stages.add_parser("card", help="training run -> README.md beside the drafter")
    card.set_defaults(run=_card)
    _add_paths(card, ("run_dir",), required=True)
    return parser


def _add_training(parser: argparse.ArgumentParser, name: str, algorithm: Algorithm) -> None:
    parser.set_defaults(run=partial(_train, name, algorithm), init_from=None)
    parser.add_argument("--target", "--model", help=MODEL)
    _add_paths(parser, ("prompts", "out", "answers", "cache", "run_dir"), required=False)
    if algorithm.takes_weights:
        text = "a DSpark drafter (for DFlash, either) whose weights and draft ids are taken over"
        parser.add_argument("--init-from", type=Path, help=text)
    _add_flags(parser, algorithm.shape, free=SHAPE_FROM_TARGET)
    _add_flags(parser, Answering(), Collecting(), algorithm.batching, algorithm.loss, LoopConfig())


def _answer(args: argparse.Namespace) -> None:
    from .stages import answer

    answer(args.model, args.prompts, args.out, _read_flags(args, Answering()))


def _collect(args: argparse.Namespace) -> None:
    from .stages import collect, default_layers, model_config

    layers = args.layers or default_layers(model_config(args.model))
    collect(args.model, args.answers, args.cache, layers, _read_flags(args, Collecting()))


def _train(name: str, algorithm: Algorithm, args: argparse.Namespace) -> None:
    from .pipeline import Layout, train_everything
    from .stages import train_drafter

    is_whole = _is_whole(args)
    options = TrainingOptions(
        shape=_read_flags(args, _shape(algorithm, args)),
        batching=_read_flags(args, algorithm.batching),
        loss=_read_flags(args, algorithm.loss),
        loop=_read_flags(args, LoopConfig()),
    )
    if not is_whole:
        target = Path(args.target)
        files = TrainingFiles(args.answers, target, args.cache, args.run_dir, args.init_from)
        train_drafter(name, files, options, {"command": args.command})
        return
    train_everything(
        name,
        args.target,
        args.prompts,
        Layout(args.out),
        answering=_read_flags(args, Answering()),
        collecting=_read_flags(args, Collecting()),
        options=options,
        init_from=args.init_from,
        command=args.command,
    )


def _shape(algorithm: Algorithm, args: argparse.Namespace) -> AnyShape:
    """The shape where no flag says otherwise."""
    from .block_tasks import adopt_shape
    from .stages import model_config

    shape = algorithm.default_shape(model_config(args.target))
    if args.init_from is None:
        return shape
    assert isinstance(shape, DSparkShape | DFlashShape), f"{shape} takes no weights over"
    return adopt_shape(shape, args.init_from)


def _calibrate(args: argparse.Namespace) -> None:
    from .calibrate import calibrate_dspark

    num_answers = _read_flags(args, Calibrating()).num_answers
    calibrate_dspark(args.checkpoint, args.target, args.cache, num_answers=num_answers)


def _shrink(args: argparse.Namespace) -> None:
    import json

    from .answers import count_tokens, read_answers
    from .shrink import shrink_block

    vocab_size = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    counts = count_tokens(read_answers(args.answers), vocab_size)
    shrink_block(args.checkpoint, args.out, counts, args.draft_vocab_size)


def _card(args: argparse.Namespace) -> None:
    from .card import write_card

    write_card(args.run_dir)


def _is_whole(args: argparse.Namespace) -> bool:
    """Whether every stage is asked for, and not the training alone.

    Raises ValueError unless the paths of one of them are given completely and alone.
    """
    given = {name for name in (*WHOLE, *TRAINING_ONLY) if getattr(args, name) is not None}
    if given == set(WHOLE):
        return True
    if given == set(TRAINING_ONLY):
        _refuse(args, Answering(), Collecting())
        return False
    whole, only = (" ".join(_flag(name) for name in names) for names in (WHOLE, TRAINING_ONLY))
    raise ValueError(f"{args.stage} needs {whole} for every stage, or {only} to train only")


def _refuse(args: argparse.Namespace, *groups: AnyOptions) -> None:
    for name in (field.name for group in groups for field in fields(group)):
        if getattr(args, name) is not None:
            raise ValueError(f"{_flag(name)} has no effect where answers and cache are given")


def _add_paths(parser: argparse.ArgumentParser, names: tuple[str, ...], *, required: bool) -> None:
    for name in names:
        parser.add_argument(_flag(name), type=Path, required=required)


def _add_flags(
    parser: argparse.ArgumentParser, *groups: AnyOptions, free: tuple[str, ...] = ()
) -> None:
    """Flags that were not given read as None; the defaults of `free` ones follow the target."""
    for group in groups:
        for field in fields(group):
            default = getattr(group, field.name)
            text = FROM_TARGET if field.name in free else f"default: {default}"
            parser.add_argument(_flag(field.name), type=_kind(default), help=text)


def _read_flags(args: argparse.Namespace, defaults: Options) -> Options:
    values = {field.name: getattr(args, field.name) for field in fields(defaults)}
    return replace(defaults, **{k: value for k, value in values.items() if value is not None})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind(default: object) -> Callable[[str], object]:
    """What parses a flag of a field with this default."""
    if isinstance(default, tuple):
        return _float_list if isinstance(default[0], float) else _int_list
    assert isinstance(default, int | float | str), f"no flag is made for {default!r}"
    return type(default)


def _int_list(text: str) -> tuple[int, ...]:
    """`28,29` -> (28, 29)."""
    return tuple(int(part) for part in text.split(","))


def _float_list(text: str) -> tuple[float, ...]:
    """`0,0.6` -> (0.0, 0.6)."""
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
