"""The command line: `truespec serve | generate | chat | convert | audit | bench | train`.

Flags are made from the option classes. A command imports its code only when it runs.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from truespec.config import EngineConfig, Option, ServerConfig, options
from truespec.params import LogprobParams, SamplingParams
from truespec.utils.command_line import add_flags, check_values, read_values

ALIASES = {"deterministic": "--enable-deterministic-inference"}
Config = TypeVar("Config")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Raises `SystemExit` for wrong flags."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ROOMS:
        return _run_room(args[0], args[1:])
    parser = _parser()
    namespace = parser.parse_args(args)
    try:
        return int(namespace.run(namespace))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"truespec {namespace.command}: {error}\n")
        return 2


def _serve(namespace: argparse.Namespace) -> int:
    from truespec.server.launch import serve

    values = _values(namespace, [*options(EngineConfig), *options(ServerConfig)])
    return serve(_config(EngineConfig, values), _config(ServerConfig, values))


def _generate(namespace: argparse.Namespace) -> int:
    from truespec.llm import LLM

    llm = LLM(_config(EngineConfig, _values(namespace, options(EngineConfig))))
    prompt = sys.stdin.read() if namespace.prompt == "-" else namespace.prompt
    result = llm.generate(prompt, _sampling(namespace))[0]
    sys.stdout.write(result.text + "\n")
    if namespace.logprobs is not None:
        for record in result.records:
            mode = record.modes[0]
            best = zip(mode.top_ids, mode.top_logprobs, strict=True)
            others = "  ".join(f"{_shown(llm, i)} {value:.4f}" for i, value in best)
            line = f"{record.origin:8} {mode.logprob:9.4f}  {_shown(llm, record.token_id)}"
            sys.stdout.write(f"{line:32} | {others}\n")
    return 0


def _chat(namespace: argparse.Namespace) -> int:
    from truespec.llm import LLM

    llm = LLM(_config(EngineConfig, _values(namespace, options(EngineConfig))))
    messages: list[dict[str, str]] = []
    sys.stdout.write("An empty line ends the conversation.\n")
    while line := _ask("> "):
        messages.append({"role": "user", "content": line})
        result = llm.chat([messages], _sampling(namespace))[0]
        messages.append({"role": "assistant", "content": result.text})
        sys.stdout.write(result.text + "\n")
    return 0


def _convert(namespace: argparse.Namespace) -> int:
    from pathlib import Path

    from truespec.convert import convert

    convert(namespace.gguf, Path(namespace.directory), namespace.dtype)
    return 0


@dataclass(frozen=True, slots=True)
class Command:
    """A command of this file.

    Attributes:
        classes: option classes its flags come from.
        arguments: adds flags of its own.
    """

    help: str
    run: Callable[[argparse.Namespace], int]
    classes: tuple[type, ...]
    arguments: Callable[[argparse.ArgumentParser], None] | None = None


def _sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus mass")
    parser.add_argument("--seed", type=int, default=None, help="repeats an output")


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, help="text to continue; - reads it from stdin")
    parser.add_argument("--logprobs", type=int, default=None, help="show so many alternatives")
    _sampling_flags(parser)


def _convert_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gguf", help="GGUF file or the name of a packaged model")
    parser.add_argument("directory", help="where the Hugging Face directory is written")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")


COMMANDS = {
    "serve": Command("serve a model over HTTP", _serve, (EngineConfig, ServerConfig)),
    "generate": Command("continue a text", _generate, (EngineConfig,), _generate_flags),
    "chat": Command("talk to a model", _chat, (EngineConfig,), _sampling_flags),
    "convert": Command("write a GGUF file as a directory", _convert, (), _convert_flags),
}
# Commands that are rooms of their own, with their own flags.
ROOMS = {"audit": "audit", "bench": "bench", "train": "training"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="truespec", description=__doc__)
    parser.add_argument("--version", action="version", version=version("truespec"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False
        )
        sub.set_defaults(run=command.run)
        if command.classes:
            sub.add_argument("model", nargs="?", help="the same as --model-path")
            sub.add_argument("--config", help="JSON or TOML file with options; flags win over it")
        for cls in command.classes:
            add_flags(sub, options(cls), ALIASES)
        if command.arguments is not None:
            command.arguments(sub)
    for name, room in ROOMS.items():
        commands.add_parser(name, help=f"see truespec {name} --help ({room})")
    return parser


def _run_room(command: str, args: Sequence[str]) -> int:
    """Run a room's own command line."""
    sys.argv = [f"truespec {command}", *args]
    runpy.run_module(f"truespec.{ROOMS[command]}", run_name="__main__", alter_sys=False)
    return 0


def _values(namespace: argparse.Namespace, known: Sequence[Option]) -> dict[str, object]:
    """Given options by name: flags, then the file. Raises `ValueError`."""
    values = read_values(namespace.config) if namespace.config else {}
    check_values(values, known, namespace.config or "")
    given = vars(namespace)
    values |= {option.name: given[option.name] for option in known if option.name in given}
    if namespace.model is not None:
        if values.get("model_path", namespace.model) != namespace.model:
            raise ValueError(f"MODEL is {namespace.model}, --model-path is {values['model_path']}")
        values["model_path"] = namespace.model
    return values


def _config(cls: type[Config], values: dict[str, object]) -> Config:
    names = {option.name for option in options(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


def _sampling(namespace: argparse.Namespace) -> SamplingParams:
    top_k = getattr(namespace, "logprobs", None)
    return SamplingParams(
        temperature=namespace.temperature,
        top_p=namespace.top_p,
        seed=namespace.seed,
        max_tokens=namespace.max_tokens,
        logprobs=None if top_k is None else LogprobParams(top_k=top_k),
    )


def _ask(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        return ""


def _shown(llm: object, token_id: int) -> str:
    return repr(llm.tokenizer.token_text(token_id))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
