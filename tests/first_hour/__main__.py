"""The first hour of six kinds of users, typed: ``make first-hour``.

    python -m tests.first_hour [USER ...] [--wheel FILE] [--out FILE] [--into FOLDER]

Each types the commands of its page in docs/first-hour, all of them and in their order, in an empty
folder and a new environment, and must come to a right answer. A wheel is made from this tree if
none is given. Needs the package index, or what pip has of it; minutes, and gigabytes of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.first_hour.typist import WentWrongError
from tests.first_hour.users import USERS, Given
from tests.packaging.check_wheel import build_wheel
from tests.packaging.run_docs import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="first_hour", description=__doc__)
    parser.add_argument("users", nargs="*", metavar="USER", help=", ".join(USERS))
    parser.add_argument("--wheel", type=Path, help="default: made from this tree")
    parser.add_argument("--out", type=Path, help="write what was typed, and the seconds, as JSON")
    parser.add_argument("--into", type=Path, help="keep the folders here; default: temporary ones")
    asked = parser.parse_args()
    if unknown := [user for user in asked.users if user not in USERS]:
        parser.error(f"USER must be of {', '.join(USERS)}, got {unknown[0]}")
    with tempfile.TemporaryDirectory(prefix="kvswap-first-hour-") as name:
        into = (asked.into or Path(name)).resolve()
        wheel = (asked.wheel or build_wheel(into / "dist")).resolve()
        given = Given(wheel, _pinned_torch())
        hours = [_hour(user, into / user, given) for user in asked.users or USERS]
    print(_table(hours))
    if asked.out is not None:
        facts = {"machine": _machine(), "wheel": wheel.name, "hours": hours}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return int(any(hour["wrong"] for hour in hours))


def _hour(user: str, folder: Path, given: Given) -> dict[str, Any]:
    """One user's: how long each command took, or what went wrong."""
    print(f"\n== {user}", flush=True)
    folder.mkdir(parents=True)
    began, wrong, steps = time.monotonic(), "", []
    try:
        steps = USERS[user](folder, given).steps
    except WentWrongError as error:
        wrong = str(error)
        print(f"{user}: {wrong}", flush=True)
    return {
        "user": user, "seconds": round(time.monotonic() - began, 1), "wrong": wrong,
        "steps": [{"typed": step.typed, "seconds": round(step.seconds, 1)} for step in steps],
    }  # fmt: skip


def _table(hours: list[dict[str, Any]]) -> str:
    lines = ["", f"{'user':<12} {'seconds':>8}  longest command, and how it ended"]
    for hour in hours:
        longest = max(hour["steps"], key=lambda step: step["seconds"], default=None)
        told = f"{longest['seconds']:.0f} s of {longest['typed'][:60]}; right" if longest else ""
        lines.append(f"{hour['user']:<12} {hour['seconds']:>8.0f}  {told or 'WRONG'}")
    return "\n".join(lines)


def _pinned_torch() -> str:
    """As this tree's environments have it: what a wheel was made for."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^torch==\S+$", pins, re.MULTILINE)
    return pin


def _machine() -> dict[str, Any]:
    system = subprocess.run(["uname", "-srm"], text=True, capture_output=True).stdout.strip()
    return {"system": system, "processors": len(os.sched_getaffinity(0)),
            "load": [round(each, 1) for each in os.getloadavg()],
            "python": sys.version.split()[0]}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
