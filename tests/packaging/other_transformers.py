"""Runs one test file on the oldest and on the newest transformers that are promised.

    python -m tests.packaging.other_transformers [--may-skip] [release ...]

is what ``make other-transformers`` runs. A release comes once, into build/other-transformers, with
those packages alone that it must have otherwise than constraints.txt says (25 MB for both); all
else is the environment's. With --may-skip, as in ``make test`` outside of CI, a release that cannot
be had is said in one line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/python/test_other_transformers.py"
NEWEST = "5.24.0"
# transformers before 5.18 needs huggingface_hub below 2, and that a client of its own.
HUB_1 = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9", "certifi==2025.11.12")


def oldest() -> str:
    """The release that pyproject.toml's range begins with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (begin,) = (
        found[1]
        for line in project["dependencies"]
        if (found := re.match(r"transformers>=([\d.]+)", line))
    )
    return begin if begin.count(".") == 2 else f"{begin}.0"


def fetch(release: str) -> tuple[Path, str]:
    """The folder with that release, and why it cannot be had: nothing where it can."""
    folder = ROOT / "build" / "other-transformers" / release
    if folder.is_dir():
        return folder, ""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        print(f"other-transformers: fetching {release} (12 MB, once)", flush=True)
        pip = [*(sys.executable, "-m", "pip", "--disable-pip-version-check"), "install", "-q"]
        pip += ["--retries", "2", "--no-deps", "--no-compile", "--target", f"{name}/packages"]
        wanted = [f"transformers=={release}"]
        if tuple(map(int, release.split(".")[:2])) < (5, 18):
            wanted += HUB_1
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True)
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return folder, told[-1] if told else f"pip ended with {done.returncode}"
        (Path(name) / "packages").rename(folder)
    return folder, ""


def main() -> int:
    may_skip = "--may-skip" in sys.argv[1:]
    asked = [each for each in sys.argv[1:] if not each.startswith("-")]
    failed = 0
    for release in asked or [oldest(), NEWEST]:
        folder, why = fetch(release)
        if why:
            print(f"other-transformers: {'skipped' if may_skip else 'failed'}, {release} is not to "
                  f"be had ({why}); when it is: make other-transformers")  # fmt: skip
            failed |= not may_skip
            continue
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
        print(f"other-transformers: {release}", flush=True)
        failed |= subprocess.run(pytest, cwd=ROOT, env=environment).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
