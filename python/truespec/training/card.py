"""The card of a trained drafter: what it is, how it was made, and its held-out figures.

Knows options.json, history.jsonl and the exported checkpoint; measures nothing.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from safetensors import safe_open

from .algorithms import ALGORITHMS
from .record import read_options, replace_text

Line = Mapping[str, float]


def write_card(run_dir: Path) -> None:
    """Write `run_dir/export/README.md`."""
    options, export = read_options(run_dir), run_dir / "export"
    history = [json.loads(x) for x in (run_dir / "history.jsonl").read_text().splitlines()]
    best = max(history, key=lambda line: (line.get("dev/greedy", 0.0), line["step"]))
    parts = [
        f"# {str(options['algorithm']).upper()} drafter",
        *_facts(options, export),
        *_origin(options),
        *_held_out(best),
        *_growth(options, history),
    ]
    replace_text(export / "README.md", "\n".join(parts) + "\n")


def _facts(options: Mapping[str, object], export: Path) -> list[str]:
    weights = export / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        sizes = [prod(file.get_slice(name).get_shape()) for name in file.keys() if name != "d2t"]  # noqa: SIM118  safe_open is no dict
    served_as = ALGORITHMS[str(options["algorithm"])].served_as
    rows = {
        "served with": f"`--speculative-algorithm {served_as}`",
        "model": options.get("model", "see the command"),
        "shape": _listed(options["shape"]),
        "size": f"{sum(sizes):,} parameters, {weights.stat().st_size / 1e6:.1f} MB",
        "started from": options["init_from"],
        "data": _listed(options["data"]),
        "answers": _listed(options.get("answering")),
        "features": _listed(options.get("collecting")),
        "batches": _listed(options["batching"]),
        "loss": _listed(options["loss"]),
        "optimiser": _listed(options["loop"]),
    }
    return _table(("", ""), [(name, value) for name, value in rows.items() if value])


def _origin(options: Mapping[str, object]) -> list[str]:
    """The command; seeds are among the options above."""
    return ["", "## Make it again", "", "```sh", str(options["command"]), "```"]


def _held_out(best: Line) -> list[str]:
    lengths = {k.removeprefix("dev/"): v for k, v in best.items() if k.startswith("dev/greedy")}
    rows = [
        (k.removeprefix("greedy/").replace("greedy", "all"), f"{lengths[k]:.2f}") for k in lengths
    ]
    places = [(k.removeprefix("dev/row"), f"{v:.2f}") for k, v in best.items() if "dev/row" in k]
    return [
        "",
        "## Held-out answers",
        "",
        f"Step {best['step']}, greedy: tokens per target pass, bonus included; and how often a",
        "draft is right, given that those before it were.",
        "",
        *_table(("category", "accepted length"), rows),
        "",
        *_table(("draft", "acceptance"), [(str(int(i) + 1), value) for i, value in places]),
    ]


def _growth(options: Mapping[str, object], history: list[Line]) -> list[str]:
    rows = [
        (
            str(line["step"]),
            f"{_tokens_per_step(options) * line['step'] / 1e6:.2f}M",
            f"{line['dev/greedy']:.2f}" if "dev/greedy" in line else "",
            f"{line['dev/prob']:.2f}" if "dev/prob" in line else "",
        )
        for line in history
    ]
    names = ("step", "tokens", "greedy", "T = 1 (expected)")
    text = "Tokens count every answer and prompt as often as they were drawn."
    return ["", "## Accepted length against training tokens", "", text, "", *_table(names, rows)]


def _tokens_per_step(options: Mapping[str, object]) -> float:
    """Sequences drawn in a step times their mean length."""
    data, batching, loop = (_numbers(options[name]) for name in ("data", "batching", "loop"))
    mean = data["tokens"] / data["answers"]
    return min(batching["num_sequences"], data["answers"]) * loop["num_threads"] * mean


def _numbers(group: object) -> dict[str, float]:
    assert isinstance(group, dict), group
    return group


def _listed(group: object) -> str:
    """`layers 2, block 7`; empty for nothing."""
    if not isinstance(group, dict):
        return ""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in group.items())


def _table(names: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[str]:
    lines = [names, ("---",) * len(names), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
