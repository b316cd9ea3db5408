"""Renders bench figures: a markdown card, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from truespec.bench.acceptance import AcceptedLengths
from truespec.bench.spec import Figures


def markdown(figures: Mapping[str, Figures]) -> str:
    """Tables of accepted length, acceptance by position, time shares and speed."""
    parts = [
        "## Accepted length",
        "",
        "Tokens per step, bonus included; in brackets without loops.",
    ]
    parts += _length_table(figures)
    parts += ["", "## Conditional acceptance by position (T = 0)", ""]
    parts += _position_table(figures)
    parts += ["", "## Speed", "", "Tokens per second (ratio to plain decoding), greedy.", ""]
    parts += _speed_table(figures)
    parts += ["", "## Where a step's time goes (batch 1)", ""]
    parts += _share_table(figures)
    return "\n".join(parts) + "\n"


def as_json(figures: Mapping[str, Figures]) -> dict[str, object]:
    """The same as plain data."""
    return {
        name: {
            "accepted_length": {
                str(temperature): {
                    category: {
                        "mean": counts.mean,
                        "mean_without_loops": counts.fresh_mean,
                        "num_steps": counts.num_steps,
                        "conditional_acceptance": counts.conditional,
                    }
                    for category, counts in table.items()
                    if counts.num_steps
                }
                for temperature, table in one.lengths.items()
            },
            "tokens_per_second": {str(b): v for b, v in one.tokens_per_second.items()},
            "time_shares": one.shares,
        }
        for name, one in figures.items()
    }


def plot(figures: Mapping[str, Figures], path: Path) -> None:
    """Accepted length by category and speed by batch size, as a PNG."""
    import matplotlib.pyplot as plt

    colors = {name: f"C{index}" for index, name in enumerate(figures)}
    drafted = {n: f for n, f in figures.items() if any(c.num_steps for c in _greedy(f).values())}
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    width = 0.8 / max(1, len(drafted))
    for index, (name, one) in enumerate(drafted.items()):
        table = _greedy(one)
        places = [i + (index - (len(drafted) - 1) / 2) * width for i in range(len(table))]
        means = [counts.mean for counts in table.values()]
        left.bar(places, means, width, label=name, color=colors[name])
        left.set_xticks(range(len(table)), list(table))
    left.set_ylabel("accepted length, T = 0")
    left.legend(loc="lower center", ncols=len(drafted), fontsize="small", framealpha=0.9)
    for name, one in figures.items():
        batches = sorted(one.tokens_per_second)
        speeds = [one.speed(b) for b in batches]
        right.plot(batches, speeds, marker="o", label=name, color=colors[name])
    right.set_xlabel("batch size")
    right.set_ylabel("tokens per second")
    right.set_ylim(bottom=0)
    right.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def _greedy(one: Figures) -> Mapping[str, AcceptedLengths]:
    return one.lengths[min(one.lengths)]


def _length_table(figures: Mapping[str, Figures]) -> list[str]:
    categories = list(dict.fromkeys(c for f in figures.values() for c in _greedy(f)))
    rows = ["", "| algorithm | T | " + " | ".join(categories) + " |"]
    rows.append("| --- " * (len(categories) + 2) + "|")
    for name, one in figures.items():
        for temperature, table in one.lengths.items():
            if not table["all"].num_steps:
                continue
            cells = [f"{table[c].mean:.2f} ({table[c].fresh_mean:.2f})" for c in categories]
            rows.append(f"| {name} | {temperature:g} | " + " | ".join(cells) + " |")
    return rows


def _position_table(figures: Mapping[str, Figures]) -> list[str]:
    rates = {n: f.lengths[min(f.lengths)]["all"].conditional for n, f in figures.items()}
    deepest = max((len(r) for r in rates.values()), default=0)
    rows = ["| algorithm | " + " | ".join(str(i + 1) for i in range(deepest)) + " |"]
    rows.append("| --- " * (deepest + 1) + "|")
    for name, values in rates.items():
        if values:
            cells = [f"{v:.2f}" for v in values] + [""] * (deepest - len(values))
            rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def _speed_table(figures: Mapping[str, Figures]) -> list[str]:
    batches = sorted(next(iter(figures.values())).tokens_per_second)
    rows = ["| algorithm | " + " | ".join(f"batch {b}" for b in batches) + " |"]
    rows.append("| --- " * (len(batches) + 1) + "|")
    plain = figures.get("NONE")
    for name, one in figures.items():
        cells = []
        for batch in batches:
            ratio = f" ({one.speed(batch) / plain.speed(batch):.2f}x)" if plain else ""
            cells.append(f"{one.speed(batch):.0f}{ratio}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def _share_table(figures: Mapping[str, Figures]) -> list[str]:
    phases = list(next(iter(figures.values())).shares)
    rows = ["| algorithm | " + " | ".join(phases) + " |", "| --- " * (len(phases) + 1) + "|"]
    for name, one in figures.items():
        rows.append(f"| {name} | " + " | ".join(f"{one.shares[p]:.0%}" for p in phases) + " |")
    return rows
