"""What users took on a bare Debian: a file each, and the table of docs/versions.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.first_hour.limits import LIMITS
from tests.packaging.run_docs import ROOT

RESULTS = ROOT / "tests" / "first_hour" / "results"
PAGE = ROOT / "docs" / "versions.md"
MARKS = re.compile(r"(<!-- first-hour -->\n).*?(<!-- /first-hour -->)", re.DOTALL)


def record(hour: dict[str, Any]) -> None:
    """Writes the result of a user who came to a right answer, and the page's table."""
    RESULTS.mkdir(exist_ok=True)
    name = f"{hour['machine'].lower().replace(' ', '-')}_{hour['user']}.json"
    (RESULTS / name).write_text(json.dumps(hour, indent=2) + "\n", encoding="utf-8")
    write_table()


def write_table() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def results() -> list[dict[str, Any]]:
    """All that are there, in the order of machines and limits."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    return sorted(found, key=lambda each: (each["machine"], list(LIMITS).index(each["user"])))


def table(found: Iterable[dict[str, Any]]) -> str:
    """A row for each user on each machine."""
    lines = [
        "| machine | user | limit | took | processor | load, cores | Python | torch | when |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        took = minutes(each["answer_seconds"])
        shown = [
            each["machine"], each["user"], minutes(each["limit_seconds"]),
            took if each["within"] else f"**{took}**", minutes(each["answer_processor_seconds"]),
            f"{each['load_before']:.1f} to {each['load_after']:.1f}, {each['cores']}",
            each["python"], each["torch"], each["date"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def minutes(seconds: float) -> str:
    """``2 min 05 s``."""
    return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"


def with_table(page: str) -> str:
    """The page with the table of what results there are between its marks."""
    if len(MARKS.findall(page)) != 1:
        raise SystemExit(f"first-hour: {PAGE} must have <!-- first-hour --> and its end once")
    return MARKS.sub(lambda found: f"{found[1]}{table(results())}\n{found[2]}", page)


def without_paths(typed: str, *paths: Path) -> str:
    """A command without the names of this machine's folders."""
    for path in sorted(map(str, paths), key=len, reverse=True):
        typed = typed.replace(f"{path}/", "")
    return typed
