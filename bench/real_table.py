"""Tables of the real model: what a budget buys, by task too, and its time.

And where look-ups are lost, and two stages of a score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.presets_table import NOT_RUN
from bench.quality.methods import parse
from bench.quality.report import interval, right_answers
from bench.quality.tasks import LOSSES
from kvswap_torch import format_bytes

Result = dict[str, Any]
FIRST = "12 of"  # columns of the first stage that a table shows; the others stand in the results


@dataclass(frozen=True)
class Target:
    """What is aimed at; None: nothing.

    Parameters
    ----------
    kl
        Most nats to the full cache's distribution, over answers and over text.
    same
        Least share of tokens at which the same one is most likely, likewise.
    worse
        Exact answers that may be lost, as a share; 0: no loss whose interval excludes 0.
    """

    kl: float | None
    same: float | None
    worse: float


# How a tuned config chooses, by how its file's name ends.
WAYS = {"_true": "true query", "_predicted": "predicted but for one layer"}
REAL = ("smollm2",)  # models that the targets are for
# By share of the full cache's memory, and whether the config is a tuned one.
TARGETS = {
    ("1/8", False): Target(0.03, 0.97, 0.0),
    ("1/13", False): Target(None, None, 0.05),
    ("1/13", True): Target(0.03, 0.97, 0.0),
    ("1/34", True): Target(0.08, None, 0.1),
}


def product_rows(results: list[Result]) -> Iterator[str]:
    """A line for each model, length and budget: the cache itself, paired with the full cache."""
    yield (
        "| model, tokens, documents | memory | columns, groups of tokens | right | difference "
        "| kept | KL, answers | same | KL, text | same | target |"
    )
    yield "|---|" + "---|" * 10
    for result in results:
        for length, part in result["lengths"].items():
            full = part["methods"]["full"]
            title = f"{result['model']}, {int(length):,}, {full['documents']}"
            yield f"| {title} | all | | {right_answers(full)} | | | | | | | |"
            for name in sorted(filter(_is_shown, part["methods"]), key=_order):
                method = part["methods"][name]
                target = verdict(name, method) if result["model"] in REAL else ""
                yield _product_row(int(length), name, method, target)
            for name, why in part["impossible"].items():
                yield (
                    f"| {int(length):,} | {_label(name)} | does not fit: {_least(why)} |" + " |" * 8
                )


def _is_shown(name: str) -> bool:
    return name.startswith(("product:memory=", "product:config="))


def _order(name: str) -> tuple[float, int, str]:
    """The larger budget first, and the defaults before what was changed."""
    settings = parse(name)[1]
    return -float(Fraction(settings.get("memory", "1"))), len(settings), name


def _product_row(length: int, name: str, method: Result, target: str) -> str:
    asked, text = method["tasks"]["asked"], method["tasks"]["language"]
    cells = [
        f"{length:,}, {method['documents']}",
        _label(name),
        f"{_columns(method)}, {_groups(method)}",
        right_answers(method),
        interval(asked["exact_difference"], "+.2f"),
        interval(asked["kept"]),
        *(f"{part[what][0]:.3f}" for part in (asked, text) for what in ("kl", "agree")),
        target,
    ]
    return f"| {' | '.join(cells)} |"


def _columns(method: Result) -> str:
    ranks = sorted(set(method["ranks"]))
    shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return f"{shown} in int4" if method.get("summary_dtype") == "int4" else shown


def _groups(method: Result) -> str:
    groups = method["groups_per_step"]  # a mean over documents
    return f"{groups:.0f} of {method['selected_tokens'] / groups:.0f}"


def _label(name: str) -> str:
    settings = parse(name)[1]
    memory, config = settings.pop("memory", "no limit"), settings.pop("config", None)
    parts = [memory, "the defaults" if config is None else "tuned"]
    parts += [words for end, words in WAYS.items() if Path(config or "").stem.endswith(end)]
    parts += [f"`{key}={value}`" for key, value in settings.items()]
    return ", ".join(parts)


def _least(why: str) -> str:
    """Of a budget's refusal: what would do."""
    return why.partition("must be ")[2].partition(" for ")[0]


def verdict(name: str, method: Result) -> str:
    """``met``, or what is missed; empty where nothing is aimed at."""
    settings = parse(name)[1]
    is_plain = set(settings) <= {"memory", "config"}
    target = TARGETS.get((settings.get("memory", ""), "config" in settings))
    if target is None or not is_plain:
        return ""
    asked, text = method["tasks"]["asked"], method["tasks"]["language"]
    mean, _, high = asked["exact_difference"]
    missed: dict[str, list[str]] = {}
    if (mean < -target.worse) if target.worse else (high < 0):
        missed["answers"] = []
    for part, what in ((asked, "answers"), (text, "text")):
        if target.kl is not None and part["kl"][0] > target.kl:
            missed.setdefault("KL", []).append(what)
        if target.same is not None and part["agree"][0] < target.same:
            missed.setdefault("same token", []).append(what)
    words = (f"{name} ({' and '.join(of)})" if of else name for name, of in missed.items())
    return f"missed: {', '.join(words)}" if missed else "met"


def task_rows(results: list[Result], shares: tuple[str, ...] = ("1/8", "1/13")) -> Iterator[str]:
    """A line for each task, by the defaults: what is right, or what a continuation loses."""
    yield f"| text, tokens, documents | task | full cache | {' | '.join(shares)} |"
    yield "|---|---|---|" + "---|" * len(shares)
    for result in results:
        for length, part in result.get("lengths", {}).items():
            names = [f"product:memory={share}" for share in shares]
            full = part["methods"]["full"]
            title = f"{result['text']}, {int(length):,}, {full['documents']}"
            measured = (*part["able"], *(task for task in LOSSES if task in full["tasks"]))
            for task in measured if part["methods"].keys() & set(names) else ():
                told = full["tasks"][task]
                of_all = f"loss {told['loss'][0]:.2f}" if task in LOSSES else _share_of(told)
                cells = " | ".join(_task_cell(task, part, name) for name in names)
                yield f"| {title} | {task} | {of_all} | {cells} |"
                title = ""
            for task, share in part["left_out"].items():
                yield f"| {title} | {task} | {share:.2f} | left out |" + " |" * (len(shares) - 1)
                title = ""


def _share_of(told: dict[str, Any]) -> str:
    return f"{told['exact'][0]:.2f} of {told['answers']}{_by_turn(told)}"


def _task_cell(task: str, part: Result, name: str) -> str:
    if name not in part["methods"]:
        return "does not fit" if name in part["impossible"] else NOT_RUN
    told = part["methods"][name]["tasks"][task]
    kind, form = ("loss", "+.3f") if task in LOSSES else ("exact", "+.2f")
    apart = f"KL {told['kl'][0]:.3f}, same {told['agree'][0]:.2f}"
    return f"{interval(told[f'{kind}_difference'], form)}{_by_turn(told)}; {apart}"


def _by_turn(told: dict[str, Any]) -> str:
    """Of a conversation: what is right in its first turn, its second..."""
    shares = ", ".join(f"{share:.2f}" for share in told.get("by_turn") or ())
    return f" (by turn {shares})" if shares else ""


def speed_rows(results: list[Result]) -> Iterator[str]:
    """A line for each cache that decoded beside the others."""
    yield (
        "| tokens | KV memory | columns, groups of tokens | ms per token (quartiles) "
        "| of the first | read per token |"
    )
    yield "|---|---|---|---|---|---|"
    for result in results:
        tokens = f"{result['tokens']:,}"
        for name, told in result["methods"].items():
            label = _label(name) if "ranks" in told else FULL_CACHE
            yield f"| {tokens} | {label} | {_decoded(told)}"
            tokens = ""


FULL_CACHE = "all (`DynamicCache`)"


def _decoded(told: Result) -> str:
    """The rest of a line: what a cache is made of, how long it took and what it read."""
    low, high = told["quartiles"]
    time = f"{told['ms']:.1f} ({low:.1f} to {high:.1f}) | {told['ratio']:.2f}"
    if "ranks" not in told:
        return f"| {time} | |"
    made_of = f"{_columns(told)}, {told['groups_max']} of {told['group_tokens']}"
    if layers := told.get("resident_layers"):
        made_of += f", pages of {layers} layers"
    return f"{made_of} | {time} | {format_bytes(told['bytes_read_per_token'])} |"


def sharing_rows(results: list[Result]) -> Iterator[str]:
    """What it costs that layers share pages: a line for each disk, budget and way."""
    yield (
        "| disk | KV memory | columns, groups of tokens | ms per token (quartiles) | of the first "
        "| read per token |"
    )
    yield "|---|---|---|---|---|---|"
    for result in results:
        for name, told in result["methods"].items():
            if "ranks" in told:
                yield f"| {told['device']} | {parse(name)[1]['memory']} | {_decoded(told)}"
            else:
                yield f"| | {FULL_CACHE} | {_decoded(told)}"


def _named_setting(setting: Result) -> str:
    dtype = setting.get("summary_dtype", "int8")
    precision = "" if dtype == "int8" else f" in {dtype}"
    return f"{setting['columns']} columns{precision}, {setting['groups']} groups"


def lookup_rows(results: list[Result]) -> Iterator[str]:
    """By layer: look-ups found, and in brackets those of the oracle with as many groups."""
    for result in results:
        settings = result["settings"]
        named = " | ".join(map(_named_setting, settings))
        yield f"| layer | of all look-ups | most of them by head | {named} |"
        yield "|---|---|---|" + "---|" * len(settings)
        for row in result["by_layer"]:
            pairs = zip(row["found"], row["oracle"], strict=True)
            cells = " | ".join(f"{found:.2f} ({oracle:.2f})" for found, oracle in pairs)
            yield (
                f"| {row['layer']} | {row['share']:.2f} | {row['head']}, {row['head_share']:.2f} "
                f"| {cells} |"
            )
        cells = " | ".join(f"{s['found']:.2f} ({s['oracle']:.2f})" for s in settings)
        yield f"| all {result['layers']} | 1.00 | | {cells} |"


def stage_rows(results: list[Result]) -> Iterator[str]:
    """A score by mass in two stages, 12 columns first, beside all groups by all columns."""
    yield "| | scoring by | traffic | of the choice (worst layer) | mass held | look-ups found |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        title = f"{result['model']}, {result['length']:,} tokens, {result['chosen']} groups"
        for way in (way for way in result["ways"] if way["way"].startswith(FIRST)):
            found = "" if way["found"] is None else f"{way['found']:.2f}"
            yield (
                f"| {title} | {way['way']} | {way['traffic']:.2f} "
                f"| {way['chosen']:.2f} ({way['chosen_worst']:.2f}) | {way['held']:.2f} | {found} |"
            )
            title = ""
