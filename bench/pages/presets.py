"""Table 4: every preset in the same share of the full cache's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.pages.caption import DOES_NOT_FIT, NOT_MEASURED, caption, head, line
from bench.quality.plan import preset_method
from bench.side_by_side.plan import PRESET
from kvswap_torch import format_bytes
from kvswap_torch.compare.statistics import interval
from kvswap_torch.preset import presets

Result = dict[str, Any]
SHARE = "1/13"
SAME = ("model", "digest", "dtype", "wording", "text", "seed")  # of runs that fill one table
WHAT = (
    "Presets in {share} of the full cache's memory: {model}, {length:,} tokens, {documents}"
    " documents, {answers} answers, of which the full cache has {full:.2f} right. Each preset has"
    " its own settings, or smaller ones where theirs do not fit with half of their tokens"
    " selected. Questions are decoded token by token after the document; *known early*: the"
    " question stands at the prompt's end. Time: a step of `1b` (4 layers), 32,768 tokens, batch"
    " 1, random weights, local disk, in the memory that the preset takes there."
)
BETTER = "Answers: higher is better; bytes and times: lower is better"
COLUMNS = (
    "preset", "smaller than its own", "right answers", "difference to the full cache",
    "right, question known early", "read per token", "ms per step",
)  # fmt: skip


def joined(results: list[Result], length: str) -> Result:
    """Runs over the same documents as one; a later run's figures count.

    A method that fewer documents were given keeps its figures, with the number of documents.

    Raises
    ------
    ValueError
        For runs that differ in the model or in what is asked.
    """
    kinds = {tuple(result.get(name) for name in SAME) for result in results}
    if len(kinds) != 1:
        raise ValueError(
            f"presets: runs must be of one model and one set of questions, got {kinds}"
        )
    parts = sorted((result["lengths"][length] for result in results), key=lambda p: p["documents"])
    whole = {**parts[-1], "methods": {}, "impossible": {}}
    for part in parts:
        for kind, other in (("methods", "impossible"), ("impossible", "methods")):
            left = {name: it for name, it in whole[kind].items() if name not in part[other]}
            whole[kind] = left | part[kind]
    return whole


def preset_rows(results: list[Result], length: str, timed: Result) -> Iterator[str]:
    """A line for each preset; what does not fit says so."""
    part = joined(results, length)
    full = _answers(part["methods"]["full"])
    what = WHAT.format(
        share=SHARE, model=results[0]["model"].replace("_", " "), length=int(length),
        documents=part["documents"], answers=full["answers"], full=full["exact"][0],
    )  # fmt: skip
    yield caption(what, [*results, timed], BETTER)
    yield from head(COLUMNS)
    for preset in presets():
        row = timed["contenders"].get(f"{PRESET}{preset.name}")
        ms = f"{row['ms']:.1f}" if row else NOT_MEASURED
        yield line([f"`{preset.name}`", *_cells(part, preset.name), ms])


def _cells(part: Result, preset: str) -> list[str]:
    name, early = (preset_method(preset, SHARE, when) for when in ("inside", "after"))
    if name in part["impossible"]:
        return ["", DOES_NOT_FIT, "", "", ""]
    if name not in part["methods"]:
        return ["", NOT_MEASURED, "", "", ""]
    method, known = part["methods"][name], part["methods"].get(early)
    difference = _answers(method).get("exact_difference")
    smaller = (f"`{path}` {value}" for path, value in method.get("smaller", {}).items())
    return [
        ", ".join(smaller),
        _right(method, part),
        "" if difference is None else interval(difference, "+.2f"),
        NOT_MEASURED if known is None else _right(known, part),
        format_bytes(method["bytes_read_per_token"]),
    ]


def _answers(method: Result) -> Result:
    """Figures over all tasks that the full cache can do; where it can do none, over all."""
    return method["tasks"].get("all") or method["tasks"].get("asked", {})


def _right(method: Result, part: Result) -> str:
    """The share of right answers; run on fewer documents, on how many."""
    right = f"{_answers(method).get('exact', [0.0])[0]:.2f}"
    documents = method.get("documents", part["documents"])
    if documents < part["documents"]:
        return f"{right} of {documents} document{'s' if documents > 1 else ''}"
    return right
