"""Draws the curves of a run from its history."""

import json
from pathlib import Path


def plot_history(run_dir: Path) -> None:
    """Draw curves.png from history.jsonl: training loss, and accepted lengths over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(x) for x in (run_dir / "history.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot(steps, [line["train/loss"] for line in lines])
    left.set(xlabel="step", ylabel="loss")
    for name in ("dev/greedy", "dev/prob", "train/tau"):
        right.plot(steps, [line.get(name) for line in lines], label=name)
    right.set(xlabel="step", ylabel="accepted length, bonus included")
    right.legend()
    figure.tight_layout()
    figure.savefig(run_dir / "curves.png", dpi=110)
    pyplot.close(figure)
