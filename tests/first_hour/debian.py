"""A bare Debian in a folder, for a reader who has nothing yet.

debootstrap makes it once, as small as a container's image is, and each reader has a copy. Commands
run in it by chroot, in a mount namespace that ends with them: none of it is mounted here.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.first_hour.carried import Carried, of_this_machine
from tests.packaging.run_docs import ROOT

CACHE = ROOT / "build" / "first-hour"
# What Debian calls a release -> its number, and the tag of its Python. Users are tried on these.
RELEASES = {"bookworm": ("12", "cp311"), "trixie": ("13", "cp313")}
# Wheels are tried on the next one too.
ALL_RELEASES = RELEASES | {"testing": ("testing", "cp314")}
TOOLS = ("debootstrap", "unshare", "mount", "chroot", "apt-get", "apt-config")
# A terminal's, where each question of apt is answered with its default, and y.
PLAIN = {
    "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "DEBIAN_FRONTEND": "noninteractive",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}  # fmt: skip
ANSWERS = 'APT::Get::Assume-Yes "true";\n'
ENTER = """
set -e
root=$0
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
while [[ $1 != -- ]]; do
  mount --bind "$1" "$root$2"
  mount -o remount,bind,ro "$root$2"
  shift 2
done
shift
exec chroot "$root" "$@"
"""


class NotToBeHadError(Exception):
    """A Debian cannot be made here; the message says why and what to do."""


class Debian:
    """A copy of a bare Debian, with where packages come from and nothing else of this machine.

    Parameters
    ----------
    release
        One of `ALL_RELEASES`.
    root
        Becomes the copy's root; must not be there.
    seen
        Folders of this machine that the reader has too, read only, at the same path.

    Raises
    ------
    NotToBeHadError
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, release: str, root: Path, seen: tuple[Path, ...] = ()):
        number, _ = ALL_RELEASES[release]
        if root.exists():
            raise NotToBeHadError(f"Debian: {root} must not be there, and is; give another --into")
        self.name = f"Debian {number}"
        self.root = root
        bare = bare_root(release)
        carried = of_this_machine()
        root.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", bare, root], check=True)
        self._environment = PLAIN | carried.environment
        self._seen = {path: path for path in seen} | carried.seen
        self._settle(release, carried)
        done = subprocess.run(
            self.command("true", root / "root"), env=self.environment(), text=True,
            capture_output=True,
        )  # fmt: skip
        if done.returncode:
            raise NotToBeHadError(
                f"Debian: a command must run in {root} by unshare, mount and chroot, got "
                f"{done.stderr.strip() or done.returncode}; run this where a process may mount"
            )

    def inside(self, path: Path) -> Path:
        return Path("/") / path.relative_to(self.root)

    def command(self, script: str, folder: Path) -> list[str]:
        seen = [str(path) for pair in self._seen.items() for path in pair]
        typed = ["bash", "-c", f'cd "$0" || exit; {script}', str(self.inside(folder))]
        return ["unshare", "--mount", "bash", "-c", ENTER, str(self.root), *seen, "--", *typed]

    def environment(self) -> dict[str, str]:
        return self._environment

    def _settle(self, release: str, carried: Carried) -> None:
        files = carried.files | {
            "etc/apt/sources.list": sources(release), "etc/apt/apt.conf.d/90answers": ANSWERS,
            "etc/hosts": Path("/etc/hosts").read_text(),
            "etc/resolv.conf": Path("/etc/resolv.conf").read_text(),
        }  # fmt: skip
        for name, text in files.items():
            path = self.root / name
            path.unlink(missing_ok=True)  # may be a link to a file of this machine
            path.write_text(text, encoding="utf-8")
        for here, there in self._seen.items():
            place = self.root / there.relative_to("/")
            (place if here.is_dir() else place.parent).mkdir(parents=True, exist_ok=True)
            if not here.is_dir():
                place.touch()


def bare_root(release: str) -> Path:
    """The folder that copies are made of; minutes when it is not there yet.

    Raises
    ------
    NotToBeHadError
    """
    check_possible()
    folder = CACHE / release
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    partial, log = CACHE / f"{release}.partial", CACHE / f"{release}.log"
    shutil.rmtree(partial, ignore_errors=True)
    print(f"first-hour: debootstrap makes {release} in {folder}, once: minutes", flush=True)
    with log.open("wb") as out:
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", release, partial, mirrors()[0]],
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise NotToBeHadError(f"Debian: debootstrap must make {release}, got {last!r}; see {log}")
    partial.rename(folder)
    return folder


def check_possible() -> None:
    """Raises
    ------
    NotToBeHadError
        No root, or a program is missing.
    """
    if os.geteuid() != 0:
        raise NotToBeHadError("Debian: chroot needs root, this is another user; run it with sudo")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NotToBeHadError(
            f"Debian: {', '.join(missing)} must be on PATH; apt-get install debootstrap mount"
        )


def mirrors() -> list[str]:
    """Debian's packages and its security updates, if any, as apt here is configured.

    Raises
    ------
    NotToBeHadError
    """
    asked = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    told = subprocess.run(asked, text=True, capture_output=True).stdout.split()
    of = {end: next((site for site in told if site.rstrip("/").endswith(end)), None)
          for end in ("/debian", "/debian-security")}  # fmt: skip
    if of["/debian"] is None:
        raise NotToBeHadError("Debian: apt must name a mirror of Debian, names none; add a source")
    return [site for site in of.values() if site]


def sources(release: str) -> str:
    """A sources.list as an installed Debian has it."""
    packages, *security = mirrors()
    lines = [f"deb {packages} {release} main", f"deb {packages} {release}-updates main"]
    lines += [f"deb {site} {release}-security main" for site in security]
    return "\n".join([*lines, ""])


def own_wheel(release: str) -> Path:
    """The newest wheel in dist/ for that Debian's Python.

    Raises
    ------
    NotToBeHadError
    """
    _, tag = ALL_RELEASES[release]
    name = f"kvswap_torch-*-{tag}-*-manylinux_2_28_{platform.machine()}.whl"
    found = sorted((ROOT / "dist").glob(name), key=lambda wheel: wheel.stat().st_mtime)
    if not found:
        version = f"{tag[2]}.{tag[3:]}"
        raise NotToBeHadError(
            f"Debian: dist/{name} must be there for {release}, is not; "
            f'run: make wheels ARGS="--python {version}", or give --wheel'
        )
    return found[-1]
