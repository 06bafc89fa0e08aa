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
from bench.quality.statistics import Interval, bootstrap, paired
from bench.quality.tasks import LANGUAGE, LOSSES, NEEDLES
from bench.quality.verdict import JUDGED, judge, sentences

RESULTS = machine.RESULTS / "quality"
ABLE = 0.5  # exact answers with the full cache below which a task is left out

HEADINGS = ("method", "memory", "read/token", "recall", "needles", "all", "of the full cache's")
HEADINGS += ("loss", "KL", "agree")
Lines = list[dict[str, Any]]


def summarise(harness: Harness) -> dict[str, Any]:
    """Everything that tables and figures need, from all that the journal has."""
    lines = harness.journal.lines()
    config, shape = harness.config, harness.parts.shape
    lengths = {
        str(length): _of_length([line for line in lines if line["length"] == length])
        for length in sorted({line["length"] for line in lines if line["method"] == "full"})
    }
    return {
        "model": harness.setting.model.resolve().name,
        "digest": harness.digest,
        "dtype": str(harness.parts.dtype).removeprefix("torch."),
        "wording": harness.wording.name,
        "text": Path(harness.setting.text).name,
        "seed": harness.setting.seed,
        "config": {
            "group_tokens": config.group_tokens,
            "groups_max": config.groups_max,
            "pages_max": config.pages_max,
            "rank": list(config.ranks(shape.layers)),
            "summary_dtype": config.summary_dtype,
            "true_query_layers": list(config.true_query_layers),
            "look_ahead": config.look_ahead,
        },
        "lengths": lengths,
        "verdict": judge(lengths),
    }


def _of_length(lines: Lines) -> dict[str, Any]:
    impossible = {line["method"]: line["impossible"] for line in lines if "impossible" in line}
    lines = [line for line in lines if "impossible" not in line]
    full = [line for line in lines if line["method"] == "full"]
    able, unable = {}, {}
    for task in dict.fromkeys(s["task"] for line in full for s in line["samples"]):
        share = bootstrap([values(line, [task], exactness) for line in full])
        if task in LOSSES:
            continue
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
    tasks = {task: [task] for task in (*able, *LOSSES)}
    tasks["needles"] = [task for task in NEEDLES if task in able]
    tasks["all"] = list(able)
    tasks["asked"] = [*able, *unable]  # for what is paired answer by answer
    first = lines[0]
    memory = [line["memory_bytes"] for line in lines if line["memory_bytes"] is not None]
    chosen = _mean([line["groups_per_step"] for line in lines])
    hits = [line["hit_rate"] for line in lines if line["hit_rate"] is not None]
    layers = len(first["ranks"] or ()) or first.get("layers_read", 0)
    chosen_bytes = chosen * first["record_bytes"] * layers
    read = [line["bytes_read_per_token"] for line in lines if "bytes_read_per_token" in line]
    return {
        "documents": len(lines),
        "memory_bytes": round(_mean(memory)) if memory else None,
        "memory_share": round(_mean(memory) / first["full_bytes"], 5) if memory else None,
        "summary_bytes": first["summary_bytes"],
        "selected_tokens": (first["groups_max"] or 0) * (first["group_tokens"] or 0),
        "ranks": first["ranks"],
        "summary_dtype": first.get("summary_dtype"),
        "groups_per_step": round(chosen, 2),
        "tokens_per_step": _mean_of(lines, "tokens_per_step"),
        "clusters": _mean_of(lines, "clusters"),
        "hit_rate": round(_mean(hits), 4) if hits else None,
        "disk": _disk(lines),
        "bytes_chosen_per_token": round(chosen_bytes),
        "bytes_read_per_token": round(
            _mean(read) if read else chosen_bytes * (1 - (_mean(hits) if hits else 0.0))
        ),
        "tasks": {
            task: _compare(lines, full, of)
            for task, of in tasks.items()
            if of and any(values(line, of, exactness) for line in lines)
        },
        "layers": _layers(lines) if first["layers"] else {},
        "depths": _depths(lines, tasks["needles"]),
        "cpu_seconds": round(_mean([line["cpu_seconds"] for line in lines]), 2),
        "cpu_seconds_reading": round(_mean([line["cpu_seconds_reading"] for line in lines]), 2),
    }


def _compare(lines: Lines, full: Lines, tasks: list[str]) -> dict[str, Any]:
    def both(of: Callable[[dict], float]) -> Interval | None:
        ours, theirs = ([values(line, tasks, of) for line in which] for which in (lines, full))
        return paired(ours, theirs)

    return {
        "answers": sum(len(values(line, tasks, exactness)) for line in lines),
        "exact": bootstrap([values(line, tasks, exactness) for line in lines]),
        "exact_difference": both(exactness),
        "tokens_right": bootstrap(
            [values(line, tasks, lambda a: a["right"] / a["tokens"]) for line in lines]
        ),
        "loss": bootstrap([values(line, tasks, lambda a: a["loss"]) for line in lines]),
        "loss_difference": both(lambda a: a["loss"]),
        "kl": bootstrap([_by_token(line, tasks, lambda a: a["kl"]) for line in lines]),
        "agree": bootstrap(
            [_by_token(line, tasks, lambda a: a["agree"] / a["tokens"]) for line in lines]
        ),
        "kept": bootstrap(
            [_kept(line, other, tasks) for line, other in zip(lines, full, strict=True)]
        ),
        "by_turn": _by_turn(lines, tasks),
    }


def exactness(answer: dict[str, Any]) -> float:
    """1 for an answer that is right at each of its tokens."""
    return float(answer["exact"])


def values(line: dict[str, Any], tasks: Sequence[str], of: Callable[[dict], float]) -> list[float]:
    """One number for each answer of these tasks in a document."""
    return [
        of(answer)
        for sample in line["samples"]
        if sample["task"] in tasks
        for answer in sample["answers"]
    ]


def _by_token(line: dict[str, Any], tasks: Sequence[str], of: Callable[[dict], float]) -> list:
    """As `values`, an answer counting as often as it has tokens."""
    return [
        of(answer)
        for sample in line["samples"]
        if sample["task"] in tasks
        for answer in sample["answers"]
        for _ in range(answer["tokens"])
    ]


def _kept(line: dict[str, Any], full: dict[str, Any], tasks: Sequence[str]) -> list[float]:
    """Exactness of the answers that the full cache has right."""
    ours, theirs = (values(which, tasks, exactness) for which in (line, full))
    return [mine for mine, right in zip(ours, theirs, strict=True) if right]


def _by_turn(lines: Lines, tasks: Sequence[str]) -> list[float]:
    """Share of exact answers at each turn, over samples of several turns."""
    turns: list[list[float]] = []
    for line in lines:
        for sample in line["samples"]:
            if sample["task"] in tasks and len(sample["answers"]) > 1:
                for number, answer in enumerate(sample["answers"]):
                    turns += [[]] * (number + 1 - len(turns))
                    turns[number] = [*turns[number], exactness(answer)]
    return [round(_mean(turn), 4) for turn in turns]


def _layers(lines: Lines) -> dict[str, Any]:
    """Recall by layer over all tasks, by task, and by head where a verdict needs it.

    Means over measured rows.
    """
    judged = lines[0]["method"] in JUDGED
    first = next(iter(lines[0]["layers"].values()))
    count = len(first["best"])
    tasks = dict.fromkeys(task for line in lines for task in line["layers"])

    def mean(name: str, task: str | None, layer: int) -> float:
        pairs = [
            (_flat(part[name][layer]), part["rows"])
            for line in lines
            for key, part in line["layers"].items()
            if task in (None, key)
        ]
        return round(sum(v * rows for v, rows in pairs) / sum(rows for _, rows in pairs), 4)

    def recall(layer: int) -> Interval | None:
        return bootstrap([_row_values(line, layer) for line in lines])

    return {
        "recall": [recall(layer) for layer in range(count)],
        "best": [mean("best", None, layer) for layer in range(count)],
        "overlap": [mean("overlap", None, layer) for layer in range(count)],
        "recall_of_task": {
            task: [mean("recall", task, layer) for layer in range(count)] for task in tasks
        },
        "best_of_task": {
            task: [mean("best", task, layer) for layer in range(count)] for task in tasks
        },
        "recall_of_head": {task: _heads(lines, task) for task in tasks} if judged else {},
    }


def _flat(value: float | list[float]) -> float:
    return _mean(value) if isinstance(value, list) else value


def _row_values(line: dict[str, Any], layer: int) -> list[float]:
    """A document's recall in a layer, each task as often as rows of it were measured."""
    return [
        _mean(part["recall"][layer])
        for part in line["layers"].values()
        for _ in range(part["rows"])
    ]


def _heads(lines: Lines, task: str) -> list[list[float]]:
    parts = [line["layers"][task] for line in lines if task in line["layers"]]
    total = sum(part["rows"] for part in parts)
    layers, heads = len(parts[0]["recall"]), len(parts[0]["recall"][0])
    return [
        [
            round(sum(part["recall"][i][h] * part["rows"] for part in parts) / total, 4)
            for h in range(heads)
        ]
        for i in range(layers)
    ]


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


def _mean_of(lines: Lines, name: str) -> float | None:
    """Of lines that say it."""
    numbers = [line[name] for line in lines if line.get(name) is not None]
    return round(_mean(numbers), 1) if numbers else None


def _disk(lines: Lines) -> dict[str, Any] | None:
    """Requests, bytes and modelled ms of a token; None where nothing of it was noted."""
    noted = [line["disk"] for line in lines if line.get("disk")]
    if not noted:
        return None
    names = set.intersection(*(set(each["ms"]) for each in noted))
    return {
        "requests": round(_mean([each["requests"] for each in noted]), 2),
        "bytes": round(_mean([each["bytes"] for each in noted])),
        "ms": {
            name: round(_mean([each["ms"][name] for each in noted]), 3) for name in sorted(names)
        },
    }


def write(name: str, summary: dict[str, Any]) -> Path:
    """bench/results/quality/<name>.json, and figures where kvswap is among the methods."""
    from bench.quality.figures import draw_all

    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(summary, separators=(",", ":")) + "\n", encoding="utf-8")
    if any("kvswap" in part["methods"] for part in summary["lengths"].values()):
        draw_all(summary, RESULTS, name)
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
        console.print(table)
    for line in sentences(summary["verdict"]):
        console.print(line)


def _cells(method: dict[str, Any]) -> list[str]:
    tasks = method["tasks"]
    layers, share = method["layers"], method["memory_share"]
    recall = f"{_mean([layer[0] for layer in layers['recall']]):.3f}" if layers else "-"
    language = tasks.get(LANGUAGE, {})
    return [
        "-" if share is None else f"1/{1 / share:.1f}",
        f"{method['bytes_read_per_token'] / 1024:.0f} KiB",
        recall,
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


def interval(value: Interval | None, form: str = ".2f") -> str:
    """``0.95 (0.90 to 1.00)``."""
    if value is None:
        return "-"
    return f"{value[0]:{form}} ({value[1]:{form}} to {value[2]:{form}})"
