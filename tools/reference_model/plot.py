"""Draws the accuracy over steps from a training log."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SURE = ("same", "other")


def read_log(path: Path) -> list[dict]:
    """Entries of a log; a last line cut short by a kill is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def running_steps(entries: list[dict]) -> list[dict]:
    """Steps counted on where a run began anew with weights of the one before."""
    counted, offset, last = [], 0, 0
    for entry in entries:
        if entry["step"] + offset < last:
            offset = last
        last = entry["step"] + offset
        counted.append(entry | {"step": last})
    return counted


def draw_plot(log: Path, path: Path) -> None:
    """Plot exact answers over steps, one line per length."""
    entries = [entry for entry in running_steps(read_log(log)) if "accuracy" in entry]
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for entry in entries:
        for length, counts in entry["accuracy"].items():
            pairs = [counts[skill] for skill in SURE if skill in counts]
            asked = sum(pair[1] for pair in pairs)
            if asked:
                steps, shares = lines.setdefault(length, ([], []))
                steps.append(entry["step"])
                shares.append(sum(pair[0] for pair in pairs) / asked)
    figure, axes = plt.subplots(figsize=(7, 4))
    for length, (steps, shares) in lines.items():
        axes.plot(steps, shares, marker=".", label=f"{length} tokens")
    axes.set(xlabel="step", ylabel="exact answers", ylim=(-0.02, 1.02))
    axes.set_title("One fact among others, held-out text (on the way)")
    if lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
