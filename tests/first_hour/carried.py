"""What a new machine here needs of this one: where packages come from, and certificates.

pip's settings become one pip.conf. Files and folders of this machine that they name are seen by the
new one below `SEEN`, where none of its packages writes.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SEEN = Path("/mnt/carried")
PIP = (
    "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "client-cert",
    "proxy", "constraint", "timeout", "default-timeout", "retries", "disable-pip-version-check",
)  # fmt: skip
# A page of such an index refers to files beside the index.
INDEXES = ("index-url", "extra-index-url")
VARIABLES = re.compile(
    r"(http|https|ftp|all|no)_proxy|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|GIT_SSL_CAINFO",
    re.IGNORECASE,
)
TOKEN = re.compile(r"(file://)?(/[^\s]+)")


@dataclass
class Carried:
    """Variables, files by their path there, and what is seen there of this machine.

    Attributes
    ----------
    seen
        Path here -> path there, read only.
    """

    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    seen: dict[Path, Path] = field(default_factory=dict)

    def rewritten(self, value: str, is_index: bool = False) -> str:
        """A setting as it is right there: what it names of this machine is carried."""

        def there(found: re.Match[str]) -> str:
            path = Path(found[2])
            if not path.exists():
                return found[0]
            brought = path.parent if is_index else path
            self.seen[brought] = _below(SEEN, brought)
            return f"{found[1] or ''}{_below(SEEN, path)}"

        return TOKEN.sub(there, value) if value.startswith(("/", "file:")) else value


def of_this_machine() -> Carried:
    """Of pip and apt as they are configured for who asks."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True
    )
    apt = subprocess.run(["apt-config", "dump", "Acquire"], text=True, capture_output=True)
    return carried(done.stdout.splitlines(), apt.stdout.splitlines(), os.environ)


def carried(pip: Iterable[str], apt: Iterable[str], environment: Mapping[str, str]) -> Carried:
    """Of ``pip config list``, ``apt-config dump`` and the environment."""
    all_of_it = Carried()
    for name, value in environment.items():
        if VARIABLES.fullmatch(name):
            all_of_it.environment[name] = all_of_it.rewritten(value)
    sections: dict[str, dict[str, str]] = defaultdict(dict)
    # Those of the environment hold over those of files.
    for line in sorted(pip, key=lambda line: line.startswith(":env:")):
        section, _, setting = line.partition(".")
        name, _, value = setting.partition("=")
        if name in PIP:
            words = " ".join(str(ast.literal_eval(value)).split())
            section = "global" if section == ":env:" else section
            sections[section][name] = all_of_it.rewritten(words, name in INDEXES)
    all_of_it.files["etc/pip.conf"] = "".join(
        f"[{section}]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
        for section, settings in sections.items()
    )
    proxies = [line for line in apt if re.match(r"Acquire::https?::(.*::)?Proxy\b", line)]
    all_of_it.files["etc/apt/apt.conf.d/90carried"] = "\n".join([*proxies, ""])
    return all_of_it


def _below(folder: Path, path: Path) -> Path:
    return folder / path.relative_to("/")
