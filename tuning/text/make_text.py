"""Makes the calibration text from Debian's python3.11-doc: plain text, one document after another.

    python tuning/text/make_text.py /usr/share/doc/python3.11/html/_sources

It is run by hand, once; the result is kept in the repository.
"""

from __future__ import annotations

import lzma
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RELEASE = "3.11.2"
FOLDERS = ("tutorial", "howto", "faq", "reference", "whatsnew")
# logging-cookbook: a document of the reference model's demo; the rest is no prose or repeats.
SKIPPED = {"logging-cookbook", "index", "clinic", "grammar", "changelog"}
NEWS = ("2.2", "2.3", "2.5", "3.3", "3.6", "3.9", "3.11")  # of whatsnew: every other would do
END = "\f\n"  # between documents

DROPPED = re.compile(
    r"\.\. (index|_|highlight|sectionauthor|moduleauthor|module|currentmodule|only|toctree|image"
    r"|figure|raw|include|literalinclude|testsetup|testcleanup|contents|\||productionlist"
    r"|[A-Z$])"
)
DIRECTIVE = re.compile(r"^(\s*)\.\. [\w:+-]+::\s*(.*)$")
ROLE = re.compile(r":[\w:+-]+:`([^`]+)`")
LINK = re.compile(r"`([^`<]+?)\s*<([^`>]+)>`__?")
UNDERLINE = re.compile(r"^\s*([=\-*^~\"#+])\1{2,}\s*$")


def plain_role(match: re.Match) -> str:
    """`text <target>` -> text, `~a.b` -> b, `!name` -> name."""
    text = re.sub(r"\s*<[^>]*>$", "", match[1], flags=re.DOTALL)
    return text.rsplit(".", 1)[-1] if text.startswith("~") else text.lstrip("!")


def plain_text(source: str) -> str:
    """reStructuredText without its markup, as far as lines of it can be told apart."""
    lines: list[str] = []
    dropped_from: int | None = None  # indent of a directive whose block is left out
    for line in source.replace("\r\n", "\n").split("\n"):
        stripped = line.lstrip()
        indent = len(line) - len(stripped)
        if dropped_from is not None and stripped and indent <= dropped_from:
            dropped_from = None
        if dropped_from is not None or UNDERLINE.match(line):
            continue
        if stripped == ".." or DROPPED.match(stripped):
            dropped_from = indent
            continue
        directive = DIRECTIVE.match(line)
        if directive:
            line = directive[1] + directive[2]
        elif re.match(r":\w+:( |$)", stripped):  # an option of a directive
            continue
        lines.append(line.rstrip())
    text = ROLE.sub(plain_role, "\n".join(lines))
    text = LINK.sub(lambda m: f"{m[1]} ({m[2]})", text)
    text = re.sub(r"``([^`\n]+)``", r"\1", text).replace("::\n", ":\n").replace("\\ ", "")
    return re.sub(r"\n{3,}", "\n\n", text.replace("|release|", RELEASE)).strip() + "\n"


def license_text(source: str) -> str:
    """The licences that hold for the manual, from its own page about them."""
    first = source.index("Terms and conditions for accessing")
    last = source.index(".. _OtherLicenses:")
    return plain_text(source[first:last])


def main() -> None:
    root = Path(sys.argv[1])
    paths = [
        path
        for folder in FOLDERS
        for path in sorted((root / folder).glob("*.rst.txt"))
        if (name := path.name.removesuffix(".rst.txt")) not in SKIPPED
        and (folder != "whatsnew" or name in NEWS)
    ]
    documents = [plain_text(path.read_text(encoding="utf-8")) for path in paths]
    data = END.join(documents).encode()
    (HERE / "manual.txt.xz").write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    licences = license_text((root / "license.rst.txt").read_text(encoding="utf-8"))
    copyrights = plain_text((root / "copyright.rst.txt").read_text(encoding="utf-8"))
    head = (
        f"manual.txt.xz holds {len(paths)} documents of the manual of Python {RELEASE}, taken from "
        "the Debian\npackage python3.11-doc. Changes made: the markup was removed (make_text.py), "
        "the documents\nwere joined. Facts that are laid in when a model is calibrated are no part "
        "of it.\n\nDocuments: "
        + ", ".join(str(path.relative_to(root)).removesuffix(".rst.txt") for path in paths)
    )
    (HERE / "LICENSE.txt").write_text(f"{head}\n\n{copyrights}\n{licences}", encoding="utf-8")
    print(f"{len(paths)} documents, {len(data)} bytes")


if __name__ == "__main__":
    main()
