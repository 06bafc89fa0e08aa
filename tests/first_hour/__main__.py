"""The first hour of new users, typed: ``make first-hour``.

    python -m tests.first_hour [USER ...] [--debian RELEASE] [--wheel FILE] [--record]

Each types the commands of its page in docs/first-hour, all of them and in their order, in an empty
folder and a new environment, and must come to a right answer within its limit. With --debian that
is a bare Debian of its own, made by debootstrap, where the page's Debian packages are installed
too; that needs root. Without a wheel one is made from this tree, or with --debian found in dist/.
The user ``clone`` needs none. Needs the package index, or what pip has of it; minutes, and
gigabytes of disk.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.first_hour import debian, results
from tests.first_hour.clone import clone
from tests.first_hour.limits import LIMITS
from tests.first_hour.machine import Host, Machine
from tests.first_hour.typist import Typist, WentWrongError
from tests.first_hour.users import GGUF_FOLDER, MODEL, USERS, Given
from tests.packaging.check_wheel import build_wheel
from tests.packaging.run_docs import ROOT

ALL: dict[str, Callable[[Path, Given], Typist]] = {"clone": clone} | USERS
USED = (
    "import importlib.metadata, platform; "
    "print(platform.python_version(), importlib.metadata.version('torch'))"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="first_hour", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("users", nargs="*", metavar="USER", help=", ".join(ALL))
    parser.add_argument("--debian", choices=debian.RELEASES, help="default: this machine")
    parser.add_argument("--wheel", type=Path, help="default: made from this tree, or of dist/")
    parser.add_argument("--out", type=Path, help="write what was typed, and the seconds, as JSON")
    parser.add_argument("--into", type=Path, help="keep the folders here; default: temporary ones")
    parser.add_argument("--no-limits", action="store_true", help="the time is no reason to fail")
    parser.add_argument("--record", action="store_true", help="into the tree: results and the page")
    parser.add_argument("--table", action="store_true", help="write the page's table, and end")
    asked = parser.parse_args()
    if unknown := [user for user in asked.users if user not in ALL]:
        parser.error(f"USER must be of {', '.join(ALL)}, got {unknown[0]}")
    if asked.record and not asked.debian:
        parser.error("--record: must be given with --debian, was given without")
    if asked.table:
        results.write_table()
        return 0
    try:
        hours = _hours(asked)
    except debian.NotToBeHadError as error:
        print(f"first-hour: {error}", file=sys.stderr)
        return 1
    print(_table(hours))
    if asked.out is not None:
        asked.out.write_text(json.dumps(hours, indent=2) + "\n", encoding="utf-8")
    return int(any(hour["wrong"] or not (hour["within"] or asked.no_limits) for hour in hours))


def _hours(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One after the other; a Debian is gone after its user, unless it is to be kept."""
    users = asked.users or (ALL if asked.debian else USERS)
    if asked.debian:
        debian.check_possible()
        debian.CACHE.mkdir(parents=True, exist_ok=True)
    hours = []
    beside = debian.CACHE if asked.debian else None
    with tempfile.TemporaryDirectory(prefix="kvswap-first-hour-", dir=beside) as name:
        into = (asked.into or Path(name)).resolve()
        wheel = _wheel(asked, into) if set(users) & set(USERS) else Path("none.whl")
        for user in users:
            root = into / user
            machine: Machine = Host()
            if asked.debian:
                machine = debian.Debian(asked.debian, root, (MODEL, _gguf_folder()))
            folder = root / "root" / "hour" if asked.debian else root
            hours.append(_hour(user, folder, Given(wheel, _pinned_torch(), machine)))
            if asked.record and not hours[-1]["wrong"]:
                results.record(hours[-1])
            if asked.debian and not asked.into:
                shutil.rmtree(root)
    return hours


def _wheel(asked: argparse.Namespace, into: Path) -> Path:
    if asked.wheel:
        return asked.wheel.resolve()
    return debian.own_wheel(asked.debian) if asked.debian else build_wheel(into / "dist").resolve()


def _gguf_folder() -> Path:
    GGUF_FOLDER.mkdir(parents=True, exist_ok=True)
    return GGUF_FOLDER


def _hour(user: str, folder: Path, given: Given) -> dict[str, Any]:
    """One user's: how long each command took and how it ended, and what was used."""
    print(f"\n== {user}, {given.machine.name}", flush=True)
    folder.mkdir(parents=True)
    if given.wheel.is_file() and not isinstance(given.machine, Host):
        copy = shutil.copy(given.wheel, folder)
        given = replace(given, wheel=given.machine.inside(Path(copy)))
    hour: dict[str, Any] = {
        "user": user, "machine": given.machine.name, "limit_seconds": LIMITS[user].seconds,
        "answer_seconds": None, "within": False, "wrong": "", "seconds": None,
        "cores": len(os.sched_getaffinity(0)), "nice": os.nice(0),
        "load_before": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "version": importlib.metadata.version("kvswap_torch"), "steps": [],
    }  # fmt: skip
    try:
        steps = ALL[user](folder, given).steps
    except WentWrongError as error:
        print(f"{user}: {error}", flush=True)
        return hour | {"wrong": str(error)}
    answer = LIMITS[user].reached(steps)
    paths = (ROOT, folder, given.machine.inside(folder))
    return hour | _used(folder, given.machine) | {
        "wheel": given.wheel.name if user in USERS else None,
        "answer_seconds": round(answer.seconds, 1),
        "answer_processor_seconds": round(answer.processor_seconds, 1),
        "within": answer.seconds <= LIMITS[user].seconds,
        "seconds": round(sum(step.seconds for step in steps), 1),
        "load_after": round(os.getloadavg()[0], 1),
        "steps": [
            {"typed": results.without_paths(step.typed, *paths), "seconds": round(step.seconds, 1),
             "processor_seconds": round(step.processor_seconds, 1)} for step in steps
        ],
    }  # fmt: skip


def _used(folder: Path, machine: Machine) -> dict[str, str]:
    """The Python and the torch of the environment that the user has made."""
    reader = Typist("laptop", folder, {}, machine)
    (found,) = [*folder.glob("env/bin/activate"), *folder.glob("*/.venv/bin/activate")]
    told = reader.type(f'{machine.inside(found.parent)}/python -c "{USED}"').split()
    return {"python": told[0], "torch": told[1]}


def _table(hours: list[dict[str, Any]]) -> str:
    lines = ["", f"{'user':<12} {'answer':>12} {'limit':>12}  longest command, and how it ended"]
    for hour in hours:
        if hour["wrong"]:
            lines.append(f"{hour['user']:<12} {'':>25}  WRONG")
            continue
        longest = max(hour["steps"], key=lambda step: step["seconds"])
        end = "right" if hour["within"] else "right, OVER THE LIMIT"
        lines.append(
            f"{hour['user']:<12} {results.minutes(hour['answer_seconds']):>12} "
            f"{results.minutes(hour['limit_seconds']):>12}  "
            f"{longest['seconds']:.0f} s of {longest['typed'][:60]}; {end}"
        )
    return "\n".join(lines)


def _pinned_torch() -> str:
    """As this tree's environments have it: what a wheel was made for."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^torch==\S+$", pins, re.MULTILINE)
    return pin


if __name__ == "__main__":
    sys.exit(main())
