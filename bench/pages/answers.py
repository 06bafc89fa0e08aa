"""Tables 2 and 3: answers of the cache by its defaults beside the full cache's, and their time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.headline import NO_PREFETCH, fastest_full, is_without_prefetch, made_of
from bench.pages.caption import DOES_NOT_FIT, NOT_MEASURED, caption, head, line, share
from bench.quality.methods import FULL, parse
from bench.quality.report import right_answers
from kvswap_torch import format_bytes
from kvswap_torch.compare.statistics import interval

Result = dict[str, Any]
NEAR_TOKENS = 200  # by which a timed document may differ in length from those that were answered
HIGHER = "Answers: higher is better; KL divergence, bytes and times: lower is better"
COLUMNS = (
    "tokens, documents", "settings", "KV memory", "rank, groups of tokens", "right answers",
    "answers kept", "loss, answers (nats)", "KL, answers (nats)", "same token, text",
)  # fmt: skip
MADE_OF = (
    "Answers kept: of those that the full cache has right, with a 95 % interval over documents."
    " Loss: of the right answer's tokens, teacher-forced, mean over all answers."
    " Same token: share of 127 positions of the text at which the most likely token is the same."
)


def length_rows(results: list[Result]) -> Iterator[str]:
    """Table 2: the reference model by length; each run has a row of its own full cache."""
    what = f"Answers of the reference model, {results[0]['dtype']}, by length; defaults. {MADE_OF}"
    yield caption(what, results, HIGHER)
    yield from head([*COLUMNS, "needles found", "read per token"])
    for length in results[0]["lengths"]:
        for part in (each["lengths"][length] for each in results if length in each["lengths"]):
            for name, method in sorted(part["methods"].items(), key=lambda item: _order(item[0])):
                needles = interval(method["tasks"]["needles"]["exact"])
                read = format_bytes(method["bytes_read_per_token"])
                yield line([*_answered(length, part, name, method), needles, read])


def real_rows(results: list[Result], timed: list[Result]) -> Iterator[str]:
    """Table 3: a real model; of each length and settings the run over most documents."""
    what = f"Answers and time per token of SmolLM2-135M-Instruct, batch 1. {MADE_OF}"
    yield caption(what, [*results, *timed], HIGHER)
    yield from head([*COLUMNS, "ms per token", "full cache's ms"])
    for length, name, part in _of_most_documents(results):
        method = part["methods"].get(name)
        if method is None:
            cells = [f"{int(length):,}", _settings(name), "", "", DOES_NOT_FIT]
            yield line([*cells, *[""] * (len(COLUMNS) + 2 - len(cells))])
            continue
        times = _times(timed, int(length), name, method)
        yield line([*_answered(length, part, name, method), *times])


def _of_most_documents(results: list[Result]) -> Iterator[tuple[str, str, Result]]:
    best: dict[tuple[int, str], Result] = {}
    for result in results:
        for length, part in result["lengths"].items():
            for name in (*part["methods"], *part["impossible"]):
                known = best.get((int(length), name))
                if known is None or known["documents"] < part["documents"]:
                    best[int(length), name] = part
    for length, name in sorted(best, key=lambda key: (key[0], _order(key[1]))):
        yield str(length), name, best[length, name]


def _order(name: str) -> tuple[bool, bool, str]:
    """The full cache, then the defaults, then what was tuned; the larger budget first."""
    settings = parse(name)[1]
    return name != FULL, "config" in settings, f"{len(settings.get('memory', '')):02}{name}"


def _answered(length: str, part: Result, name: str, method: Result) -> list[str]:
    asked, text = method["tasks"]["asked"], method["tasks"]["language"]
    cells = [f"{int(length):,}, {part['documents']}", _settings(name)]
    if name == FULL:
        return [*cells, "all", "", right_answers(method), "", f"{asked['loss'][0]:.3f}", "", ""]
    groups = method["groups_per_step"]  # a mean over documents
    tokens = method["selected_tokens"] / groups
    return [
        *cells,
        share(method["memory_share"]),
        f"{_rank(method)}, {groups:.0f} of {tokens:.0f}",
        right_answers(method),
        interval(asked["kept"]),
        f"{asked['loss'][0]:.3f}",
        f"{asked['kl'][0]:.3f}",
        f"{text['agree'][0]:.3f}",
    ]


def _settings(name: str) -> str:
    if name == FULL:
        return "full cache"
    settings = parse(name)[1]
    return f"{'tuned' if 'config' in settings else 'defaults'}, {settings['memory']}"


def _rank(method: Result) -> str:
    ranks = sorted(set(method["ranks"]))
    shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return f"{shown} in int4" if method.get("summary_dtype") == "int4" else shown


def _times(timed: list[Result], length: int, name: str, method: Result) -> tuple[str, str]:
    """A time counts only if it was measured with the very same settings."""
    for result in timed:
        told = result["methods"].get(name)
        if told is None or "ms" not in told or abs(result["tokens"] - length) > NEAR_TOKENS:
            continue
        fastest, label = fastest_full(result["methods"])
        full = f"{fastest:.1f} ({label})"
        if name == FULL:
            return "", full
        if made_of(told) == made_of(method):
            ms = f"{told['ms']:.1f}"
            return f"{ms}, {NO_PREFETCH}" if is_without_prefetch(told) else ms, full
    return ("", NOT_MEASURED) if name == FULL else (NOT_MEASURED, "")
