"""A record of runs: numbers by name, written so that a diff reads well, compared name by name."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EXACT = Path(__file__).with_name("exact.json")
SHOWN = 20  # differences of one run


def quiet(session: Any) -> None:
    """Returns when nothing more is written behind.

    What is written behind counts when it is done, and what is cropped or forgotten before that is
    never written: without this a run's ``bytes_written`` would follow the clock. A device's outbox
    may hold back the newest records until the next call.
    """
    since = time.monotonic()
    written = -1
    while True:
        counters = session.counters()
        all_of_it = counters["bytes_written"] >= counters["bytes_on_disk"]
        if counters["bytes_written"] == written and (all_of_it or time.monotonic() - since > 1):
            return
        written = counters["bytes_written"]
        time.sleep(0.05)


def counted(session: Any) -> dict[str, Any]:
    """Counters and ledger of a session, without times and calls, which no two runs share."""
    quiet(session)
    counters = {
        name: int(value)
        for name, value in session.counters().items()
        if not name.endswith("_seconds") and name != "read_calls"
    }
    return {"counters": counters, "ledger": dict(session.ledger())}


def save(runs: Mapping[str, Any], path: Path) -> None:
    """One line for each thing recorded of a run."""
    blocks = []
    for name, run in runs.items():
        lines = [f"    {json.dumps(what)}: {_packed(value)}" for what, value in run.items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line for each number that differs: "run: name[place]: expected -> found"."""
    found = json.loads(json.dumps(found))  # as a file gives it back
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found or name not in expected:
            lines.append(f"{name}: only in the {'expected' if name in expected else 'new'} record")
            continue
        told = list(itertools.islice(_differing("", expected[name], found[name]), SHOWN + 1))
        lines += [f"{name}: {line}" for line in told[:SHOWN]]
        if len(told) > SHOWN:
            lines.append(f"{name}: and more")
    return lines


def _differing(where: str, expected: Any, found: Any) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            inner = f"{where}.{name}" if where else name
            yield from _differing(inner, expected.get(name), found.get(name))
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, pair in enumerate(zip(expected, found, strict=True)):
            yield from _differing(f"{where}[{place}]", *pair)
    elif type(expected) is not type(found) or expected != found:
        yield f"{where}: {_packed(expected)} -> {_packed(found)}"


def _packed(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
