"""The three numbers of docs/index.md: each of one configuration, which stands in its line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench import headline
from bench.pages.caption import caption, head, line, share
from kvswap_torch import format_bytes

Result = dict[str, Any]
LENGTH, METHOD = "32768", "product:memory=1/13"
WHAT = "Each number is of one configuration, which its line names."
DIRECTION = "Memory and time: lower is better; answers: higher is better"


def home_rows(answered: Result, timed: Result) -> Iterator[str]:
    """Memory and answers of one run, then a time of another model.

    Parameters
    ----------
    answered
        A result of ``bench quality`` with the defaults at 1/13.
    timed
        A cell of ``bench side_by_side``. Its model has random weights, so it has no answers.
    """
    yield caption(WHAT, (answered, timed), DIRECTION)
    yield from head(("", "what it is", "measured with"))
    yield from answered_rows(answered)
    yield time_row(timed)


def answered_rows(result: Result) -> Iterator[str]:
    """The memory, and the answers that are kept in it."""
    part = result["lengths"][LENGTH]
    method = part["methods"][METHOD]
    asked = method["tasks"]["asked"]
    kept, low, high = asked["kept"]
    memory, full = format_bytes(method["memory_bytes"]), format_bytes(part["full_bytes"])
    place = f"{headline.DEFAULTS}, {headline.NAMES['reference_model']}, {int(LENGTH):,} tokens"
    yield line(
        [
            f"**{share(method['memory_share'])}**",
            f"of the full cache's memory: {memory} instead of {full}",
            f"{place}, batch 1",
        ]
    )
    yield line(
        [
            f"**{kept:.2f}**",
            f"of the full cache's right answers are kept (95 % interval {low:.2f} to {high:.2f})",
            f"the same run: {part['documents']} documents, {asked['answers']} questions",
        ]
    )


def time_row(cell: Result) -> str:
    """A step by the defaults beside the fastest full cache that was timed with it."""
    ours = next(each for each in headline.shape_lines(cell) if each.settings == headline.DEFAULTS)
    if ours.ms is None or ours.full_ms is None:
        raise ValueError(f"time_row: {ours.place} must have a time and a full cache's")
    full_ms, full = ours.full_ms
    choices = headline.CHOICES[cell["choices"]]
    return line(
        [
            f"**{ours.ms:.1f} ms**",
            f"a step; the full cache (`{full}`) takes {full_ms:.1f} ms",
            f"{headline.DEFAULTS}, `{cell['shape']}` cut to {cell['layers']} layers with random "
            f"weights, {choices}, {cell['context']:,} tokens, batch {cell['batch']}, "
            f"{cell['device']}, {ours.memory} of KV memory",
        ]
    )
