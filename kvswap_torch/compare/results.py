"""What a comparison wrote: a file that others can add methods to, and its summary.

docs/how-to/compare.md has the fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvswap_torch.compare.method import FULL
from kvswap_torch.compare.statistics import bootstrap, paired
from kvswap_torch.errors import ConfigError
from kvswap_torch.whole_file import replace_text

FORMAT, VERSION = "kvswap-compare", 1
# What each run of a method has; the last three may be null.
RUN = ("document", "tokens", "full_bytes", "answers", "memory_bytes", "bytes_read_per_token",
       "ms_per_token")  # fmt: skip
ANSWER = ("accuracy", "loss")
SAME = ("data.digest", "accuracy")  # of files whose methods may stand in one table

Run = dict[str, Any]
Results = dict[str, Any]


def summary(runs: Sequence[Run], others: Sequence[Run] | None) -> dict[str, Any]:
    """A method's means over the documents, each with the ends of its interval.

    Parameters
    ----------
    others
        Runs of what it is compared with, of at least the same documents; None: nothing.
    """
    theirs = {run["document"]: run for run in others or ()}
    both = [run for run in runs if run["document"] in theirs]

    def answers(of: Sequence[Run], name: str) -> list[list[float]]:
        return [[float(answer[name]) for answer in run["answers"]] for run in of]

    def difference(name: str) -> Any:
        paired_with = [theirs[run["document"]] for run in both]
        return paired(answers(both, name), answers(paired_with, name))

    told: dict[str, Any] = {
        "documents": len(runs),
        "answers": sum(len(run["answers"]) for run in runs),
    }
    for name in ANSWER:
        told[name] = bootstrap(answers(runs, name))
        told[f"{name}_difference"] = difference(name)
    told["tasks"] = {
        task: bootstrap([_of_task(run, task) for run in runs])
        for task in dict.fromkeys(a.get("task") for run in runs for a in run["answers"])
        if task
    }
    for name in ("memory_bytes", "bytes_read_per_token", "ms_per_token"):
        known = [run[name] for run in runs if run.get(name) is not None]
        told[name] = round(sum(known) / len(known), 3) if known else None
    full = sum(run["full_bytes"] for run in runs) / max(1, len(runs))
    told["memory_share"] = (
        None if told["memory_bytes"] is None or not full else round(told["memory_bytes"] / full, 5)
    )
    return told


def _of_task(run: Run, task: str) -> list[float]:
    """Accuracies of the answers to this task's questions."""
    return [float(answer["accuracy"]) for answer in run["answers"] if answer.get("task") == task]


def label(method: dict[str, Any]) -> str:
    """``quest@tokens:1024``; the full cache has no budget."""
    return f"{method['name']}@{method['budget']}" if method["budget"] else method["name"]


def summarised(results: Results) -> Results:
    """With a `summary` of each method that has runs, beside the baseline's."""
    methods = results["methods"]
    first = next((each for each in methods if each["name"] == FULL and each["runs"]), None)
    if first is None:
        first = next((each for each in methods if each["runs"]), None)
    results["baseline"] = None if first is None else label(first)
    for each in methods:
        if each["runs"]:
            others = None if first is None or each is first else first["runs"]
            each["summary"] = summary(each["runs"], others)
    return results


def added(results: Results, more: Results, where: str) -> Results:
    """With the methods of another file that are not here yet.

    Raises
    ------
    ConfigError
        The two were not asked the same, or judged alike.
    """
    for name in SAME:
        ours, theirs = _at(results, name), _at(more, name)
        if ours != theirs:
            raise ConfigError(
                f"--add: {where} must have {name} {ours}, as what is compared here, has {theirs}"
            )
    known = {label(each) for each in results["methods"]}
    results["methods"] += [each for each in more["methods"] if label(each) not in known]
    return results


def read(path: Path) -> Results:
    """A file of this format, checked.

    Raises
    ------
    ConfigError
        It is none, or a field is missing; names the place.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--add: must be results of kvswap compare, got {path}: {error}") from (
            error)  # fmt: skip
    _check(results, ("format", "version", "data", "accuracy", "methods"), str(path))
    if (results["format"], results["version"]) != (FORMAT, VERSION):
        raise ConfigError(
            f"--add: {path} must be of format {FORMAT} {VERSION}, is {results['format']} "
            f"{results['version']}"
        )
    for number, method in enumerate(results["methods"]):
        place = f"{path}: methods[{number}]"
        _check(method, ("name", "budget", "runs"), place)
        for at, run in enumerate(method["runs"]):
            _check(run, RUN, f"{place}.runs[{at}]")
            for answer in run["answers"]:
                _check(answer, ANSWER, f"{place}.runs[{at}].answers")
    return results


def write(path: Path, results: Results) -> None:
    """Replaces the file at once."""
    replace_text(path, json.dumps(results, indent=1) + "\n")


def _check(value: Any, names: Sequence[str], place: str) -> None:
    missing = [name for name in names if not isinstance(value, dict) or name not in value]
    if missing:
        raise ConfigError(f"--add: {place} must have {', '.join(names)}, lacks {missing[0]}")


def _at(results: Results, name: str) -> Any:
    found: Any = results
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
