"""`truespec bench spec`: accepted lengths and speed of drafters beside plain decoding."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from truespec.bench.card import as_json, markdown, plot
from truespec.bench.spec import ALGORITHMS, Plan, bench
from truespec.config import EngineConfig, options
from truespec.utils.command_line import add_flags


def main() -> int:
    """Run and print the card."""
    parser = argparse.ArgumentParser(prog="truespec bench", description=__doc__)
    parser.add_argument("what", choices=["spec"], help="what to measure")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines: prompt, category")
    parser.add_argument(
        "--algorithms",
        default="NONE,NGRAM,DSPARK",
        help="comma-separated; MTP is NEXTN with several heads",
    )
    parser.add_argument("--out", type=Path, help="directory for card.md, figures.json, plot.png")
    parser.add_argument("--max-tokens", type=int, default=Plan().max_tokens)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--speed-prompts", type=int, default=Plan().speed_prompts)
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    add_flags(parser, options(EngineConfig), {})
    given = vars(parser.parse_args())
    names = {option.name for option in options(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in given.items() if name in names})
    plan = Plan(
        max_tokens=given["max_tokens"],
        temperatures=tuple(given["temperatures"]),
        batches=tuple(given["batches"]),
        speed_prompts=given["speed_prompts"],
        rounds=given["rounds"],
    )
    algorithms = given["algorithms"].split(",")
    for name in algorithms:
        if name not in ALGORITHMS:
            parser.error(f"--algorithms: {name} is none of {', '.join(ALGORITHMS)}")
    figures = bench(config, algorithms, given["prompts"], plan)
    card = markdown(figures)
    sys.stdout.write(card)
    if given["out"] is not None:
        out: Path = given["out"]
        out.mkdir(parents=True, exist_ok=True)
        (out / "card.md").write_text(card, encoding="utf-8")
        data = json.dumps(as_json(figures), indent=2) + "\n"
        (out / "figures.json").write_text(data, encoding="utf-8")
        plot(figures, out / "plot.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
