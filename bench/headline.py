"""README's table: a line for each configuration, its time and its answers, and what was faster.

Time and answers stand in one line only if they were measured with the same settings. What was
measured with others, or not at all, is ``not measured``. A time of tuned settings is shown only
with their answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import RESULTS
from bench.quality.methods import parse
from bench.side_by_side.plan import CHOICES, LABELS, ON_SESSION
from kvswap_torch import format_bytes
from kvswap_torch.compare.statistics import interval

Result = dict[str, Any]
NOT_MEASURED = "not measured"
NOTHING = "nothing"
COLUMNS = (
    "settings", "model, tokens, batch", "KV memory", "ms per step", "full cache, ms per step",
    "answers kept", "KL, text (nats)", "faster there",
)  # fmt: skip
DEFAULTS, TUNED, PUBLISHED = "defaults", "tuned", "published (KVSwap's paper)"
NO_PREFETCH = "no prefetch"  # of what was measured without, as the defaults once were
#: Shapes with random weights: by a real model's choices, then by random ones, the worst case.
CELLS = tuple(
    f"1b_{place}_local{choices}"
    for place in ("8k_b8", "32k_b1", "32k_b8")
    for choices in ("_smollm2", "")
)
#: A time of decoding, and the qualities of what may be the same settings.
REAL = (
    ("real_speed", ("quality/smollm2_defaults", "quality/smollm2_tuned"), "4096"),
    ("real_speed_8k", ("quality/smollm2_8k_defaults", "quality/smollm2_8k_tuned"), "7936"),
)
# As `bench real_speed` and `bench side_by_side` call full caches in memory, and a key of `LABELS`.
FULL_CACHES = {"full": "dynamic", "dynamic": "dynamic", "static": "static"}
NAMES = {"smollm2": "SmolLM2-135M", "reference_model": "reference model"}


@dataclass(frozen=True)
class Line:
    """One configuration; None: not measured with these settings.

    Parameters
    ----------
    ms, full_ms
        Of a step; `full_ms` of the fastest full cache in memory beside it, with its name.
    kept
        Of the answers that the full cache has right, with the interval.
    kl
        Of the text's next token, from the full cache's, in nats.
    others
        Milliseconds by name of all that does the same work, full caches included.
    """

    settings: str
    place: str
    memory: str
    ms: float | None
    full_ms: tuple[float, str] | None
    kept: tuple[float, float, float] | None
    kl: float | None
    others: dict[str, float]

    @property
    def faster(self) -> str:
        """What was faster in the same run."""
        if self.ms is None:
            return NOT_MEASURED
        found = sorted((ms, name) for name, ms in self.others.items() if ms < self.ms)
        return ", ".join(f"{name} ({ms:.1f})" for ms, name in found) or NOTHING

    def cells(self) -> list[str]:
        full = NOT_MEASURED if self.full_ms is None else "{:.1f} ({})".format(*self.full_ms)
        return [
            self.settings,
            self.place,
            self.memory,
            NOT_MEASURED if self.ms is None else f"{self.ms:.1f}",
            full,
            NOT_MEASURED if self.kept is None else interval(self.kept),
            NOT_MEASURED if self.kl is None else f"{self.kl:.3f}",
            self.faster,
        ]


def rows(results: Path = RESULTS) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for line in lines(results):
        yield f"| {' | '.join(line.cells())} |"


def lines(results: Path = RESULTS) -> Iterator[Line]:
    for speed, qualities, length in REAL:
        found: dict[str, Result] = {}
        for quality in qualities:
            found = _read_quality(results, quality, length) | found  # the first has most documents
        yield from real_lines(_read(results / f"{speed}.json"), found, length)
    yield from reference_lines(results)
    for name in CELLS:
        yield from shape_lines(_read(results / "side_by_side" / f"{name}.json"))


def real_lines(speed: Result, quality: dict[str, Result], length: str) -> Iterator[Line]:
    """Of a real model, at each share of the full cache's memory: the defaults, then tuned ones."""
    timed = {name: told for name, told in speed["methods"].items() if "ms" in told}
    for name, told in timed.items():
        if _is_default(name):
            method = quality.get(name)
            is_same = method is not None and made_of(told) == made_of(method)
            yield _real_line(DEFAULTS, speed, told, method if is_same else None, length)
    largest_first = sorted(quality.items(), key=lambda item: -item[1]["memory_share"])
    for name, method in largest_first:
        if _is_tuned(name):
            same = (told for told in timed.values() if _is_same(told, method))
            yield _real_line(TUNED, speed, next(same, None), method, length)


def _real_line(
    settings: str, speed: Result, told: Result | None, method: Result | None, length: str
) -> Line:
    """`told` is a time, `method` the answers of the same settings; at least one of them."""
    full = fastest_full(speed["methods"])
    found = told or method
    assert found is not None
    tokens = speed["tokens"] if told else int(length)
    return Line(
        f"{settings}, {NO_PREFETCH}" if told and is_without_prefetch(told) else settings,
        f"{NAMES[speed['model']]}, {tokens:,}, 1",
        f"1/{1 / found['memory_share']:.1f}",
        told["ms"] if told else None,
        full if told else None,
        None if method is None else kept(method),
        None if method is None else kl(method),
        _full_times(speed["methods"]) if told else {},
    )


def _full_times(timed: dict[str, Result]) -> dict[str, float]:
    """Milliseconds of full caches in memory, by their labels."""
    return {LABELS[key]: timed[name]["ms"] for name, key in FULL_CACHES.items() if name in timed}


def fastest_full(timed: dict[str, Result]) -> tuple[float, str]:
    """Milliseconds and label of the fastest full cache in memory."""
    return min((ms, label) for label, ms in _full_times(timed).items())


def is_without_prefetch(told: Result) -> bool:
    """Of a row of `bench real_speed`; one that does not say is older than the prefetch."""
    return told.get("prefetch", "off") == "off"


def is_cell_without_prefetch(row: Result) -> bool:
    """Of a contender of `bench side_by_side`; older ones say only that nothing was predicted."""
    mode = row["config"].get("prefetch")
    return row["parts_ms"]["predict"] == 0 if mode is None else mode == "off"


def made_of(told: Result) -> tuple[Any, ...]:
    """What two runs must share to be of one configuration."""
    groups = told["groups_max"] if "groups_max" in told else told["groups_per_step"]
    tokens = groups * told["group_tokens"] if "group_tokens" in told else told["selected_tokens"]
    is_trusting = told.get("prefetch") == "trust"  # a verified prefetch selects as none does
    return tuple(told["ranks"]), told["summary_dtype"], groups, tokens, is_trusting


def _is_same(told: Result, method: Result) -> bool:
    return "ranks" in told and made_of(told) == made_of(method)


def kl(method: Result) -> float | None:
    """Of the text that follows a document; None: not asked for, or older than that figure."""
    text = method["tasks"].get("language")
    return None if text is None or text.get("kl") is None else text["kl"][0]


def kept(method: Result) -> tuple[float, float, float] | None:
    """Of the answers that the full cache has right; older results say only how many are right."""
    tasks = method["tasks"]
    if "asked" in tasks:
        return tuple(tasks["asked"]["kept"])
    is_nothing_right = tasks["all"]["exact"][0] == 0
    return (0.0, 0.0, 0.0) if is_nothing_right else None


def reference_lines(results: Path) -> Iterator[Line]:
    """The reference model, whose time is not measured with either's settings."""
    length, share = "32768", "product:memory=1/13"
    found = {
        DEFAULTS: _read_quality(results, "quality/reference_model_defaults", length)[share],
        PUBLISHED: _read_quality(results, "quality/reference_model", length)["paper"],
    }
    for settings, method in found.items():
        memory = f"1/{1 / method['memory_share']:.1f}"
        place = f"{NAMES['reference_model']}, {int(length):,}, 1"
        yield Line(settings, place, memory, None, None, kept(method), kl(method), {})


def shape_lines(cell: Result) -> Iterator[Line]:
    """A shape with random weights, which has no right answers; choices may be a real model's."""
    times = {key: row["ms"] for key, row in cell["contenders"].items()}
    others = {LABELS[key]: ms for key, ms in times.items() if key not in (*ON_SESSION, "floor")}
    for settings, key in ((DEFAULTS, "default"), (PUBLISHED, "kvswap")):
        row = cell["contenders"][key]
        ours = row["kv_memory_bytes"]
        yield Line(
            f"{settings}, {NO_PREFETCH}" if is_cell_without_prefetch(row) else settings,
            f"`{cell['shape']}` ({cell['layers']} layers), {CHOICES[cell['choices']]}, "
            f"{cell['context']:,}, {cell['batch']}",
            f"{format_bytes(ours)} (1/{cell['kv_bytes_full'] / ours:.1f})",
            times[key],
            fastest_full(cell["contenders"]),
            None,
            None,
            others,
        )


def _is_default(name: str) -> bool:
    return name.startswith("product:memory=") and "," not in name


def _is_tuned(name: str) -> bool:
    """A config of the tuner's in a share of the memory, with nothing changed."""
    return set(parse(name)[1]) == {"config", "memory"}


def _read(path: Path) -> Result:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_quality(results: Path, name: str, length: str) -> dict[str, Result]:
    """Methods by name, of documents of this length."""
    return _read(results / f"{name}.json")["lengths"][length]["methods"]
