"""`truespec audit`: prove on a model and drafter that speculation changes nothing."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from truespec.audit.audit import AuditReport, audit
from truespec.config import EngineConfig, options
from truespec.llm import LLM
from truespec.utils.command_line import add_flags

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a haiku about rain, then explain it.",
    "What is 17 times 23? Show your work.",
    "Write a Python function that counts the words in a text.",
)


def main() -> int:
    """Run the audit; 0 when everything was equal and drafts were accepted."""
    parser = argparse.ArgumentParser(prog="truespec audit", description=__doc__)
    add_flags(parser, options(EngineConfig), {})
    parser.add_argument("--prompts", type=Path, help="text file, one prompt per line")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.5], help="run each prompt at"
    )
    given = vars(parser.parse_args())
    names = {option.name for option in options(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in given.items() if name in names})
    # Drafts have to be made to be audited, whether they pay or not.
    config = replace(config, speculative_adaptive=False)
    if config.speculative_algorithm == "NONE":
        sys.stderr.write("truespec audit: give --speculative-algorithm\n")
        return 2
    llm = LLM(config)
    texts = PROMPTS
    if given["prompts"] is not None:
        texts = tuple(given["prompts"].read_text(encoding="utf-8").splitlines())
    prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text in texts]
    report = audit(llm, prompts, max_tokens=given["max_tokens"], temperatures=given["temperatures"])
    _show(report)
    return 0 if report.passed else 1


def _show(report: AuditReport) -> None:
    console = Console()
    table = Table(
        "T", "seed", "tokens", "equal", "max |diff|", "rescored |diff|", "accepted drafts"
    )
    for r in report.requests:
        table.add_row(
            f"{r.params.temperature:g}",
            str(r.params.seed),
            str(r.num_tokens),
            str(r.num_equal_tokens),
            f"{r.max_difference:g}",
            f"{r.max_rescored_difference:g}",
            str(r.num_accepted),
        )
    console.print(table)
    if report.num_accepted == 0:
        verdict = "nothing was shown, no draft was accepted"
    else:
        verdict = "equal to the bit" if report.passed else "NOT equal"
    console.print(f"{len(report.requests)} requests, {report.num_accepted} accepted: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
