"""What a wheel is made of, as CycloneDX 1.6 has it: ``python -m tools.sbom dist/*.whl``.

Beside each wheel stands ``NAME.cdx.json`` then: the wheel with its hash, the packages that it needs
(from its metadata), and the libraries that are inside its own (from its build_info.json).
"""

from __future__ import annotations

import email
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

# Of build_info.json: Debian's package that it is built with, its name, its license.
INSIDE = {
    "liburing": ("liburing-dev", "liburing", "MIT"),
    "highway": ("libhwy-dev", "highway", "Apache-2.0"),
    "xxhash": ("libxxhash-dev", "xxhash", "BSD-2-Clause"),
    "json": ("nlohmann-json3-dev", "nlohmann-json", "MIT"),
}
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*([^;]*)(;.*)?")


def bill_of(wheel: Path) -> dict[str, Any]:
    """Of one wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(metadata))
        built = [name for name in names if name.endswith("lib/build_info.json")]
        info = json.loads(archive.read(built[0])) if built else {}
    name, version = facts["Name"], facts["Version"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    itself = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{_normal(name)}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{_normal(name)}@{version}",
        "licenses": [{"expression": facts["License-Expression"]}],
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    inside = [_inside(*INSIDE[key]) for key in INSIDE if info.get(key)]
    needed = [_needed(line) for line in facts.get_all("Requires-Dist", ())]
    refs = [each["bom-ref"] for each in (*inside, *needed)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": itself},
        "components": [*inside, *needed],
        "dependencies": [{"ref": itself["bom-ref"], "dependsOn": refs}],
    }


def _inside(package: str, name: str, license_id: str) -> dict[str, Any]:
    """A library that was compiled in, with the version that this machine has."""
    asked = ["dpkg-query", "-W", "-f=${Version}", package]
    try:
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        version = "unknown"
    return {
        "type": "library",
        "bom-ref": f"pkg:generic/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:generic/{name}@{version}",
        "licenses": [{"license": {"id": license_id}}],
        "scope": "required",
        "properties": [{"name": "kvswap:linked", "value": "inside the wheel's libraries"}],
    }


def _needed(line: str) -> dict[str, Any]:
    """A package that pip installs beside; its versions are a range."""
    name, _, versions, marker = _REQUIREMENT.fullmatch(line.strip()).groups()
    is_extra = marker is not None and "extra" in marker
    return {
        "type": "library",
        "bom-ref": f"requires:{line}",
        "name": name,
        "purl": f"pkg:pypi/{_normal(name)}",
        "scope": "optional" if is_extra else "required",
        "properties": [{"name": "kvswap:versions", "value": f"{versions}{marker or ''}".strip()}],
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(wheels: list[str]) -> None:
    for wheel in map(Path, wheels):
        target = wheel.with_suffix(".cdx.json")
        target.write_text(json.dumps(bill_of(wheel), indent=1) + "\n", encoding="utf-8")
        print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
