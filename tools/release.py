"""Checks that a version can be released, and sets its tag.

    make release VERSION=0.2.0

The version stands in kvswap_torch/version.py alone; this changes no file. First come the checks
that take no time, all of whose findings are reported together; then ``make test``, which builds
the docs too, ``make test-long``, ``make docs-run``, which types what the pages say in a fresh
clone, and ``make wheel``.
The tag is annotated with the version's part of CHANGELOG.md. It stays on this machine until it is
pushed.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
CHECKS = (("make", "test"), ("make", "test-long"), ("make", "docs-run"), ("make", "wheel"))
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
Run = Callable[[Sequence[str]], None]


class ReleaseError(RuntimeError):
    """What stands in the way; one line for each."""


def numbers(version: str) -> tuple[int, ...]:
    """``0.2.0`` as numbers that can be compared.

    Raises
    ------
    ReleaseError
        For anything that is not three numbers.
    """
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"release: VERSION must be MAJOR.MINOR.PATCH, got {version!r}")
    return tuple(map(int, found.groups()))


def sections(changelog: str) -> dict[str, str]:
    """What stands below each ``##`` heading, the newest first."""
    parts = HEADING.split(changelog)
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def problems(root: Path, version: str, today: datetime.date) -> list[str]:
    """What must be mended before `version` can be released from the repository at `root`."""
    wanted, found = numbers(version), []
    if changed := _git(root, "status", "--porcelain"):
        found.append(f"tree: must have no changes, has {_some(changed.splitlines())}; commit them")
    written = re.search(r'__version__ = "(.*)"', _read(root / "kvswap_torch" / "version.py"))
    if written is None or written[1] != version:
        got = None if written is None else written[1]
        found.append(f"kvswap_torch/version.py: must say {version}, got {got}; change it there")
    tags = [tag for tag in _git(root, "tag", "--list", "v*").split() if VERSION.fullmatch(tag[1:])]
    newest = max((numbers(tag[1:]) for tag in tags), default=())
    if newest >= wanted:
        told = ".".join(map(str, newest))
        found.append(f"tags: {version} must be newer than v{told}; choose a larger version")
    return found + _of_changelog(_read(root / "CHANGELOG.md"), version, today)


def _of_changelog(text: str, version: str, today: datetime.date) -> list[str]:
    parts, found = sections(text), []
    heading = f"{version} ({today.isoformat()})"
    if list(parts)[:2] != ["Unreleased", heading]:
        found.append(
            f"CHANGELOG.md: must begin with the sections 'Unreleased' and '{heading}', got "
            f"{_some(parts, 2)}; write that heading below the first"
        )
    elif not parts[heading]:
        found.append(f"CHANGELOG.md: '{heading}' must say what is new, is empty")
    if parts.get("Unreleased"):
        found.append(f"CHANGELOG.md: 'Unreleased' must be empty; move it below '{heading}'")
    return found


def release(root: Path, version: str, today: datetime.date, run: Run) -> str:
    """Checks everything, then sets the tag; its name.

    Raises
    ------
    ReleaseError
        With all that is in the way.
    """
    if found := problems(root, version, today):
        raise ReleaseError("\n".join(found))
    head = _git(root, "rev-parse", "HEAD")
    for command in CHECKS:
        run(command)
    if _git(root, "rev-parse", "HEAD") != head or _git(root, "status", "--porcelain"):
        raise ReleaseError("tree: must stay as it was while it is tested, has changed; run again")
    notes = sections(_read(root / "CHANGELOG.md"))[f"{version} ({today.isoformat()})"]
    # The headings of the notes begin with git's sign of a comment.
    _git(root, "tag", "-a", f"v{version}", "--cleanup=whitespace", "-m", f"{version}\n\n{notes}")
    return f"v{version}"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _some(names: Sequence[str] | dict[str, str], most: int = 5) -> str:
    shown = list(names)[:most]
    return ", ".join(map(repr, shown)) + (", ..." if len(names) > most else "") or "nothing"


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    try:
        if len(sys.argv) != 2:
            raise ReleaseError("release: one version must be given: make release VERSION=0.2.0")
        tag = release(
            root,
            sys.argv[1],
            datetime.date.today(),
            lambda command: _checked(root, command),
        )
    except ReleaseError as error:
        sys.exit(str(error))
    print(
        f"release: {tag} is set here, and dist/ has the wheel; publish with: git push origin {tag}"
    )


def _checked(root: Path, command: Sequence[str]) -> None:
    if subprocess.run(command, cwd=root, check=False).returncode != 0:
        raise ReleaseError(f"release: {' '.join(command)} must pass and did not; no tag was set")


if __name__ == "__main__":
    main()
