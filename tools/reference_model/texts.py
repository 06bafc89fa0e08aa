"""Finds the free texts a model is trained on: Python's manual and Perl's pods."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Debian packages and the files of each that are prose.
PACKAGES = {"python3.11-doc": ".rst.txt", "perl-doc": ".pod"}
MEGABYTES_MIN = 10
# Never trained on: these two become the documents of the demo.
DOCUMENTS = {"logging-cookbook.rst.txt": "python_logging.txt", "perlop.pod": "perl_operators.txt"}
# Lists of names and copies of other pages: not prose, and perltoc repeats the held-out pages.
SKIPPED = {"perltoc.pod", "perluniprops.pod", "perlapi.pod", "perlintern.pod"}


class MissingTexts(RuntimeError):
    """The texts to train on are not on this machine; the message says how to install them."""


@dataclass(frozen=True)
class Text:
    """One file of prose."""

    name: str
    body: str

    @property
    def held_out(self) -> bool:
        """True for about one file in twelve, and for the documents of the demo."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return self.name in DOCUMENTS or digest[0] % 12 == 0


def list_files(package: str, ending: str) -> list[Path]:
    """Files of a Debian package with this ending; empty when it is not installed."""
    try:
        out = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    paths = {Path(line).resolve() for line in out.stdout.splitlines() if line.endswith(ending)}
    return sorted(path for path in paths if path.is_file())


def load_texts() -> list[Text]:
    """Reads every text, in an order that does not depend on the machine.

    Raises
    ------
    MissingTexts
        When the texts are missing, or are too short to train on. Nothing is installed here.
    """
    missing = [name for name, ending in PACKAGES.items() if not list_files(name, ending)]
    if missing:
        raise MissingTexts(
            f"texts: {' and '.join(PACKAGES)} must be installed (Debian packages), missing "
            f"{' and '.join(missing)}; run: make texts"
        )
    texts = []
    for package, ending in PACKAGES.items():
        for path in list_files(package, ending):
            if path.name not in SKIPPED:
                body = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
                # Files of one name in two folders are told apart by their parent.
                name = path.name if path.name in DOCUMENTS else f"{path.parent.name}/{path.name}"
                texts.append(Text(name, body))
    megabytes = sum(len(text.body) for text in texts) / 1e6
    if megabytes < MEGABYTES_MIN:
        raise MissingTexts(
            f"texts: {MEGABYTES_MIN} MB must be found in {list(PACKAGES)}, got {megabytes:.1f} MB;"
            f" their files were removed; run: apt-get install --reinstall {' '.join(PACKAGES)}"
        )
    return texts
