"""From the journal's lines to the summary that stands in the project."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.quality.harness import Harness
from bench.quality.methods import FULL
from bench.quality.tasks import LANGUAGE, NEEDLES
from kvswap_torch.compare.statistics import Interval, bootstrap, interval, paired

RESULTS = machine.RESULTS / "quality"
ABLE = 0.5  # exact answers with the full cache below which a task is left out

HEADINGS = ("method", "memory", "read/token", "needles", "all", "of the full cache's")
HEADINGS += ("loss", "KL", "agree")
Lines = list[dict[str, Any]]
Value = Callable[[dict[str, Any]], float]


def summarise(harness: Harness) -> dict[str, Any]:
    """Everything that tables and plots need, from all that the journal has."""
    lines = harness.journal.lines()
    return {
        "model": harness.setting.model.resolve().name,
        "digest": harness.digest,
        "dtype": str(harness.parts.dtype).removeprefix("torch."),
        "wording": harness.wording.name,
        "text": Path(harness.setting.text).name,
        "seed": harness.setting.seed,
        "lengths": {
            str(length): _of_length([line for line in lines if line["length"] == length])
            for length in sorted({line["length"] for line in lines if line["method"] == FULL})
        },
    }


def _of_length(lines: Lines) -> dict[str, Any]:
    impossible = {line["method"]: line["impossible"] for line in lines if "impossible" in line}
    lines = [line for line in lines if "impossible" not in line]
    full = [line for line in lines if line["method"] == FULL]
    able, unable = {}, {}
    for task in dict.fromkeys(s["task"] for line in full for s in line["samples"]):
        if task != LANGUAGE:
            share = bootstrap([values(line, [task], exactness) for line in full])
            (able if share[0] >= ABLE else unable)[task] = share[0]
    names = dict.fromkeys(line["method"] for line in lines)
    return {
        "documents": len(full),
        "tokens": round(sum(line["tokens"] for line in full) / len(full)),
        "full_bytes": full[0]["full_bytes"],
        "able": able,
        "left_out": unable,
        "impossible": impossible,
        "methods": {
            name: _of_method([x for x in lines if x["method"] == name], full, able, unable)
            for name in names
        },
    }


def _of_method(lines: Lines, full: Lines, able: dict, unable: dict) -> dict[str, Any]:
    numbers = {line["document"] for line in lines}
    full = [line for line in full if line["document"] in numbers]
    tasks = {task: [task] for task in (*able, LANGUAGE)}
    tasks["needles"] = [task for task in NEEDLES if task in able]
    tasks["all"] = list(able)
    tasks["asked"] = [*able, *unable]  # for what is paired answer by answer
    first = lines[0]
    groups = _mean([line.get("groups_per_step", 0.0) for line in lines])
    memory = _mean([line["memory_bytes"] for line in lines])
    hits = [line["hit_rate"] for line in lines if line.get("hit_rate") is not None]
    return {
        "documents": len(lines),
        "memory_bytes": round(memory),
        "memory_share": round(memory / first["full_bytes"], 5),
        "selected_tokens": round(groups * first.get("group_tokens", 0)),
        "ranks": first.get("ranks"),
        "summary_dtype": first.get("summary_dtype"),
        "smaller": first.get("smaller", {}),
        "prefetch": first.get("prefetch"),
        "groups_per_step": round(groups, 2),
        "hit_rate": round(_mean(hits), 4) if hits else None,
        "bytes_read_per_token": round(
            _mean([line.get("bytes_read_per_token", 0.0) for line in lines])
        ),
        "tasks": {
            task: _compare(lines, full, of)
            for task, of in tasks.items()
            if of and any(values(line, of, exactness) for line in lines)
        },
        "depths": _depths(lines, tasks["needles"]),
        "cpu_seconds": round(_mean([line["cpu_seconds"] for line in lines]), 2),
    }


def _compare(lines: Lines, full: Lines, tasks: list[str]) -> dict[str, Any]:
    def both(of: Value) -> Interval | None:
        ours, theirs = ([values(line, tasks, of) for line in which] for which in (lines, full))
        return paired(ours, theirs)

    def mean(of: Value) -> Interval | None:
        return bootstrap([values(line, tasks, of) for line in lines])

    def mean_of_tokens(of: Value) -> Interval | None:
        return bootstrap([_by_token(line, tasks, of) for line in lines])

    return {
        "answers": sum(len(values(line, tasks, exactness)) for line in lines),
        "exact": mean(exactness),
        "exact_difference": both(exactness),
        "loss": mean(lambda a: a["loss"]),
        "loss_difference": both(lambda a: a["loss"]),
        "kl": mean_of_tokens(lambda a: a["kl"]),
        "agree": mean_of_tokens(lambda a: a["agree"] / a["tokens"]),
        "kept": bootstrap(
            [_kept(line, other, tasks) for line, other in zip(lines, full, strict=True)]
        ),
    }


def exactness(answer: dict[str, Any]) -> float:
    """1 for an answer that is right at each of its tokens."""
    return float(answer["exact"])


def _answers(line: dict[str, Any], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Those of these tasks in a document."""
    chosen = [sample for sample in line["samples"] if sample["task"] in tasks]
    return [answer for sample in chosen for answer in sample["answers"]]


def values(line: dict[str, Any], tasks: Sequence[str], of: Value) -> list[float]:
    """One number for each answer."""
    return [of(answer) for answer in _answers(line, tasks)]


def _by_token(line: dict[str, Any], tasks: Sequence[str], of: Value) -> list[float]:
    """As `values`, an answer counting as often as it has tokens."""
    return [of(answer) for answer in _answers(line, tasks) for _ in range(answer["tokens"])]


def _kept(line: dict[str, Any], full: dict[str, Any], tasks: Sequence[str]) -> list[float]:
    """Exactness of the answers that the full cache has right."""
    ours, theirs = (values(which, tasks, exactness) for which in (line, full))
    return [mine for mine, right in zip(ours, theirs, strict=True) if right]


def _depths(lines: Lines, tasks: Sequence[str]) -> list[tuple[float, float]]:
    """(depth, 1 or 0) of every needle."""
    return [
        (sample["depth"], exactness(sample["answers"][0]))
        for line in lines
        for sample in line["samples"]
        if sample["task"] in tasks
    ]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def write(name: str, summary: dict[str, Any]) -> Path:
    """bench/results/quality/<name>.json; an absolute name is a path of its own."""
    path = RESULTS / f"{name.removesuffix('.json')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """A table for each length."""
    for length, part in summary["lengths"].items():
        title = f"{length} tokens, {part['documents']} documents; full cache {part['able']}"
        table = Table(title=title, caption=f"left out, not done with the full cache: "
                      f"{part['left_out'] or 'none'}")  # fmt: skip
        for column in HEADINGS:
            table.add_column(column, justify="left" if column == "method" else "right")
        for name, method in part["methods"].items():
            table.add_row(name, *_cells(method))
        for name, why in part["impossible"].items():
            table.add_row(name, why)
        console.print(table)


def _cells(method: dict[str, Any]) -> list[str]:
    tasks = method["tasks"]
    language = tasks.get(LANGUAGE, {})
    return [
        f"1/{1 / method['memory_share']:.1f}",
        f"{method['bytes_read_per_token'] / 1024:.0f} KiB",
        interval(tasks.get("needles", {}).get("exact")),
        interval(tasks.get("all", {}).get("exact")),
        interval(tasks.get("all", {}).get("kept")),
        interval(language.get("loss_difference"), "+.3f"),
        interval(language.get("kl"), ".3f"),
        interval(language.get("agree"), ".3f"),
    ]


def right_answers(method: dict[str, Any]) -> str:
    """``3 of 6``, of all that was asked."""
    asked = method["tasks"]["asked"]
    return f"{round(asked['exact'][0] * asked['answers'])} of {asked['answers']}"
