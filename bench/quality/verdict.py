"""Is KVSwap as good as the full cache at a budget, and where not: by how much, and why?"""

from __future__ import annotations

from typing import Any

POINT = 0.01  # of exact answers that a method may be below the full cache
JUDGED = ("kvswap:memory=1/13", "kvswap")
HEADS_NAMED = 3
GATHERED = ("needles", "all", "asked")  # pooled tasks


def judge(lengths: dict[str, Any]) -> dict[str, Any]:
    """For each length and judged method: the needles, and every task with a gap.

    Returns
    -------
    dict
        Length -> method -> ``memory_share``, ``selected_tokens``, ``needles`` (difference to the
        full cache with its interval), ``within_a_point`` and ``gaps``, see `_gap`.
    """
    return {
        length: {
            name: _of_method(part["methods"], name) for name in JUDGED if name in part["methods"]
        }
        for length, part in lengths.items()
    }


def _of_method(methods: dict[str, Any], name: str) -> dict[str, Any]:
    method = methods[name]
    needles = method["tasks"].get("needles", {}).get("exact_difference")
    return {
        "memory_share": method["memory_share"],
        "selected_tokens": method["selected_tokens"],
        "needles": needles,
        "within_a_point": None if needles is None else needles[0] >= -POINT,
        "gaps": {
            task: _gap(methods, name, task)
            for task, found in method["tasks"].items()
            if task not in GATHERED and _is_gap(found)
        },
    }


def _is_gap(found: dict[str, Any]) -> bool:
    """Worse only where the paired interval excludes 0."""
    difference = found.get("exact_difference")
    return difference is not None and difference[2] < 0


def _gap(methods: dict[str, Any], name: str, task: str) -> dict[str, Any]:
    """One task that a method does worse than the full cache.

    Returns
    -------
    dict
        ``difference``; ``with_exact_layer``: layer -> the difference when that layer alone attends
        everything; ``least_recall``: (layer, head, attention mass held), the heads that miss most;
        ``closed_by``: the settings of least memory whose gap is within a point, and their share.
    """
    layers = methods[name]["layers"]
    heads = [
        (layer, head, recall)
        for layer, row in enumerate(layers["recall_of_head"].get(task, ()))
        for head, recall in enumerate(row)
    ]
    return {
        "difference": methods[name]["tasks"][task]["exact_difference"],
        "with_exact_layer": {
            other.split("=")[1]: method["tasks"][task]["exact_difference"][0]
            for other, method in methods.items()
            if other.startswith("kvswap:exact=") and task in method["tasks"]
        },
        "least_recall": sorted(heads, key=lambda head: head[2])[:HEADS_NAMED],
        "closed_by": _closing(methods, task),
    }


def _closing(methods: dict[str, Any], task: str) -> tuple[str, float] | None:
    closing = [
        (method["memory_share"], name)
        for name, method in methods.items()
        if name.startswith("kvswap")
        and "exact=" not in name
        and task in method["tasks"]
        and not _is_gap(method["tasks"][task])
    ]
    share, name = min(closing, default=(None, None))
    return None if name is None else (name, share)


def sentences(verdict: dict[str, Any]) -> list[str]:
    """The verdict in words, one line for each length and method."""
    lines = []
    for length, methods in verdict.items():
        for name, found in methods.items():
            share = f"1/{1 / found['memory_share']:.1f} of the KV memory"
            what = "no needle task was done with the full cache"
            if found["needles"] is not None:
                mean, low, high = (100 * value for value in found["needles"])
                side = "within" if found["within_a_point"] else "NOT within"
                what = f"needles {mean:+.1f} points ({low:+.1f} to {high:+.1f}), {side} one"
            gaps = "; ".join(_gap_in_words(*gap) for gap in found["gaps"].items())
            lines.append(
                f"{int(length):,} tokens, {name}, {share}, {found['selected_tokens']} selected: "
                f"{what}. Gaps: {gaps or 'none'}."
            )
    return lines


def _gap_in_words(task: str, gap: dict[str, Any]) -> str:
    words = f"{task} {100 * gap['difference'][0]:+.0f} points"
    if gap["with_exact_layer"]:
        layer, left = max(gap["with_exact_layer"].items(), key=lambda item: item[1])
        words += f" ({100 * left:+.0f} with layer {layer} on the full cache)"
    if gap["closed_by"]:
        name, share = gap["closed_by"]
        words += f", closed by {name} at 1/{1 / share:.1f}"
    return words
