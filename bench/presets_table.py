"""The table of presets at equal bytes, made by `python -m bench.quality --methods presets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.quality.plan import SHARES, preset_method
from bench.quality.report import interval
from kvswap_torch import format_bytes
from kvswap_torch.preset import presets

# What papers' own comparisons lose against the full cache: points at these shares of the KV memory
# (KVSwap's table 2: RULER, Llama 3 8B, 32K tokens; Qwen3 8B of its appendix) or with so many tokens
# (PRKV's table 2: LongBench v2, Llama 3.1 8B); a share of its score (ARKV's table II: LongBench).
_KVSWAP = "2.6 of 91.6 at 1/13, 5.6 at 1/34; Qwen3: 0.9 and 3.6 of 93.1"
_OF_PRKV = "{} of 30.8 with 1,024 tokens, {} with 256"
_OF_ARKV = "keeps {} of the full score"
PAPERS = {
    "kvswap": _KVSWAP,
    "kvswap-paper": _KVSWAP,
    "infinigen": "87.0 of 91.6 at 1/13; Qwen3: 89.2 of 93.1",
    "infinigen-star": "78.7 of 91.6 at 1/13; Qwen3: 68.0 of 93.1",
    "loki": "34.0 of 91.6 at 1/13, 85.4 at 1/34; Qwen3: 2.5 and 86.9 of 93.1",
    "shadowkv": "52.3 of 91.6 at 1/13, 61.9 at 1/34; Qwen3: 9.6 and 81.2 of 93.1; "
    + _OF_PRKV.format("0.6", "1.0"),
    "quest": _OF_PRKV.format("12.7", "24.8"),
    "arkvale": _OF_PRKV.format("1.2", "1.6"),
    "snapkv": _OF_PRKV.format("1.2", "2.4"),
    "prkv": _OF_PRKV.format("0.0", "0.4"),
    "arkv-origin": _OF_ARKV.format("0.979"),
    "arkv": _OF_ARKV.format("0.972"),
    "arkv-quant": _OF_ARKV.format("0.398"),
}
# Whether what we measure has the papers' sign, and why not: model, preset. The word comes first.
_LOOKS_AHEAD = "it looks ahead in every layer, which this model does not bear"
_NO_PLACE = "with its own columns 1/13 does not fit"
_AT_THE_END = "but more: with the question at the prompt's end, as there, it loses 0.15"
SIGNS = {
    "reference_model": {
        "kvswap": "yes: it loses nothing at 1/13; at 1/34 more, with 16 columns at 32,768 tokens, "
        "and nearly all at 16,384, where 8 fit",
        "kvswap-paper": f"no: {_LOOKS_AHEAD}",
        "infinigen": f"open: {_NO_PLACE}; a quarter loses all, since {_LOOKS_AHEAD}",
        "infinigen-star": f"open: {_NO_PLACE}; a quarter loses all, since {_LOOKS_AHEAD}",
        "loki": f"open: {_NO_PLACE}; the paper gave it fewer",
        "shadowkv": "open: with its own chunks and outliers 1/13 does not fit",
        "quest": "no: it loses nothing; a third of the layers is exact",
        "arkvale": "yes: it loses next to nothing; a third of the layers is exact",
        "snapkv": f"yes, {_AT_THE_END}",
        "prkv": "no: it loses half; no layer is exact, and pages of 32 are few",
        "arkv-origin": f"yes, {_AT_THE_END}",
        "arkv": f"yes, {_AT_THE_END}",
        "arkv-quant": "no: 0.83 as the other two; its code attends no token in e4m3",
    },
    "smollm2": {
        "kvswap": "yes: at 1/13 it loses little",
        "kvswap-paper": "no: it looks ahead in every layer",
    },
}
OPEN = "open"


def _sign(model: str, preset: str) -> str:
    """In a word, with its reason; nothing where no paper says anything."""
    return SIGNS.get(model, {}).get(preset, OPEN if preset in PAPERS else "")


NOT_RUN = "not run"
SAME = ("model", "digest", "dtype", "wording", "text", "seed")  # of runs that fill one table


def _same(result: dict[str, Any], length: str) -> tuple[Any, ...]:
    """What runs of one table have in common."""
    return *(result.get(name) for name in SAME), length


def joined(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the same model over the same documents as one; a later run's figures count."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        for length, part in result["lengths"].items():
            key = _same(result, length)
            known = found.setdefault(
                (*key, part["documents"]), {**result, "lengths": {length: {**part}}}
            )
            into = known["lengths"][length]
            for kind, other in (("methods", "impossible"), ("impossible", "methods")):
                left = {name: it for name, it in into[kind].items() if name not in part[other]}
                into[kind] = left | part[kind]
    return list(found.values())


def preset_rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each model and length, the full cache first; what does not fit says so.

    Where several numbers of documents were run, a share of the memory is shown with the most.
    """
    shown: dict[tuple[Any, ...], set[str]] = {}
    for result, length, part in _parts(results):
        done = shown.setdefault(_same(result, length), set())
        shares = [share for share in SHARES if share not in done and _has(part, share)]
        done.update(shares)
        if shares:
            answers = _answers(part["methods"]["full"])["answers"]
            yield (
                f"**{result['model']}**, {int(length):,} tokens, documents: {part['documents']}, "
                f"answers: {answers}"
            )
            yield from ("", *_table(result["model"], part, shares), "")


def _parts(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Each result and length with its part, those of most documents first.

    A preset that the most documents were not given has its cells from fewer, of shares that are
    shown with the most.
    """
    parts = [
        (result, length, part)
        for result in joined(results)
        for length, part in result["lengths"].items()
    ]
    parts.sort(key=lambda each: (each[0]["model"], int(each[1]), -each[2]["documents"]))
    most: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result, length, part in parts:
        shown = most.setdefault(_same(result, length), part)
        for share in SHARES:
            if shown is not part and _has(shown, share):
                _fill(shown, part, share)
    return parts


def _fill(shown: dict[str, Any], fewer: dict[str, Any], share: str) -> None:
    for name in _names(share) - {*shown["methods"], *shown["impossible"]}:
        for kind in ("methods", "impossible"):
            if name in fewer[kind]:
                shown[kind][name] = fewer[kind][name]


def _table(model: str, part: dict[str, Any], shares: list[str]) -> Iterator[str]:
    """A line for each preset, a column for each share of the memory."""
    columns = [f"{share} of the memory" for share in shares]
    yield _line(["preset", *columns, "the papers lose", "same sign?"])
    yield "|" + "---|" * (len(shares) + 3)
    full = _answers(part["methods"]["full"])["exact"]
    yield _line(["full cache, all of the memory", *[f"{full[0]:.2f}"] * len(shares), "", ""])
    for preset in presets():
        cells = [_cell(part, preset.name, share) for share in shares]
        if preset.needs and set(cells) == {NOT_RUN}:
            cells = ["needs a file of the model"] * len(shares)
        told = (PAPERS.get(preset.name, ""), _sign(model, preset.name))
        yield _line([f"`{preset.name}`", *cells, *told])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _has(part: dict[str, Any], share: str) -> bool:
    return not _names(share).isdisjoint({*part["methods"], *part["impossible"]})


def _names(share: str) -> set[str]:
    """Of every preset in that share."""
    return {preset_method(preset.name, share) for preset in presets()}


def _cell(part: dict[str, Any], preset: str, share: str) -> str:
    name = preset_method(preset, share)
    if name in part["impossible"]:
        return "does not fit"
    if name not in part["methods"]:
        return NOT_RUN
    method = part["methods"][name]
    told = f"{_right(method, part)}, reads {format_bytes(method['bytes_read_per_token'])}"
    at_the_end = part["methods"].get(preset_method(preset, share, "after"))
    return told if at_the_end is None else f"{told}; at the end {_right(at_the_end, part)}"


def _answers(method: dict[str, Any]) -> dict[str, Any]:
    """Figures over all tasks that the full cache can do; where it can do none, over all."""
    tasks = method["tasks"]
    return tasks.get("all") or tasks.get("asked", {})


def _right(method: dict[str, Any], part: dict[str, Any]) -> str:
    """The share of right answers; over several documents, its difference to the full cache too.

    A method that was run on fewer of them says on how many.
    """
    answers = _answers(method)
    right = f"{answers.get('exact', [0.0])[0]:.2f}"
    documents = method.get("documents", part["documents"])
    if documents < part["documents"]:
        return f"{right} of {documents} document{'s' if documents > 1 else ''}"
    more = answers.get("exact_difference")
    if more is None or part["documents"] == 1:
        return right
    return f"{right}, {interval(more, '+.2f')}"
